"""The reference pages that are written by hand name what exists: classes of the adapters, and versions."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import headrace
from docs.site import reference
from headrace.dataio.core import errors
from tests.support.pages import ROOT

FRAMEWORKS = (ROOT / "docs" / "reference" / "frameworks.md").read_text()
ROW = re.compile(r"^\| `([\w-]+)`[^|]*\| ([\d.]*) ?\| ([\d.]+) \|", re.MULTILINE)


def public_names(module: str) -> set[str]:
    """The classes and functions of a module of the checkout. The framework that it imports need not be installed."""
    path = ROOT / f"{module.removeprefix('headrace.').replace('.', '/')}.py"
    tree = ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def adapters() -> dict[str, set[str]]:
    """Module → the names that the page's tables give for it; "the same" is the module of the row before."""
    found, module = dict[str, set[str]](), ""
    for cells in (line.split("|")[1:] for line in FRAMEWORKS.splitlines() if line.startswith("| ")):
        if len(cells) < 3:
            continue
        module = named[1] if (named := re.search(r"`(headrace\.[\w.]+)`", cells[1])) else module
        if named or "the same" in cells[1]:
            found.setdefault(module, set()).update(re.findall(r"`([A-Za-z]\w+)[`(.]", cells[2]))
    return found


def test_the_page_of_the_adapters_names_every_module_and_only_names_that_it_has() -> None:
    named = adapters()
    for module, names in named.items():
        assert names <= public_names(module), module
    folder = ROOT / "checkpoint" / "frameworks"
    shared = {"__init__", "metrics", "name_files", "naming", "plain", "transformers_data"}
    modules = {path.stem for path in folder.glob("*.py")} - shared
    assert {f"headrace.checkpoint.frameworks.{name}" for name in modules} <= set(named)


def test_the_versions_of_frameworks_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [line for lines in project["optional-dependencies"].values() for line in lines]
    least = dict(re.findall(r"(?m)^([\w-]+)>=([\d.]+)", "\n".join(required)))
    tested = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text()))
    rows = ROW.findall(FRAMEWORKS)
    assert len(rows) == 10
    for name, lowest, used in rows:
        assert (least.get(name, ""), tested[name]) == (lowest, used), name


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.fixture(scope="module")
def public() -> set[str]:
    """The names that the pages of the API, of the errors and of the adapters document, as `module.name`."""
    documented = reference.documented() | {f"headrace.{name}" for name in headrace.__all__}
    documented |= {f"{errors.__name__}.{name}" for name, value in vars(errors).items() if isinstance(value, type)}
    return documented | {f"{module}.{name}" for module, names in adapters().items() for name in names}


@pytest.mark.parametrize("path", EXAMPLES, ids=[str(path.relative_to(ROOT)) for path in EXAMPLES])
def test_an_example_imports_only_public_names(path: Path, public: set[str]) -> None:
    tree = ast.parse(path.read_text())
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert [module for module in modules if module.startswith("headrace.")] == []
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert {name for name in names if name.startswith("headrace.")} <= public


def test_the_examples_use_the_public_names(public: set[str]) -> None:
    assert {path.parent.name for path in EXAMPLES} >= {"examples", "migrate"}
    assert "headrace.checkpoint.import_checkpoint" in public
    assert "headrace.checkpoint.exchange.sources.open_source" not in public
