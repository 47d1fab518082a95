"""The reference pages that are written by hand name what exists: classes of the adapters, and versions."""

from __future__ import annotations

import ast
import re
import tomllib

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
