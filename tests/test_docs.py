"""The names in the documentation exist: imports of its Python code, commands and their options, and links."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace import checkpoint, dataio, loaders
from headrace.dataio.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ROOMS = ("dataio", "loaders", "checkpoint", "bench")
MODULES = {"dcp", "dist", "io", "json", "np", "os", "sys", "torch"}
_TABLE_CODE = re.compile(r"`(headrace [^`]+)`")


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for tag, body in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL) if tag in languages]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `headrace …` line, without its comment."""
    lines = [
        line for block in blocks(page, "", "console", "sh", "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    for line in [*lines, *_TABLE_CODE.findall(page.read_text().replace("\n", " "))]:
        if line.startswith("headrace "):
            yield re.split(r"\s{2,}|\s#\s", line)[0].split()[1:] + re.findall(r"--[a-z][a-z-]+", line.split(" # ")[0])


@functools.cache
def help_of(*words: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return said.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_sub_command_has_help(command: str) -> None:
    text = help_of(command)
    found = re.match(r"usage: headrace [\w-]+[^{]*\{([\w,-]+)\}\s+\.\.\.", text)
    for words in [(command,), *((command, name) for name in (found[1].split(",") if found else ()))]:
        assert help_of(*words).startswith(f"usage: headrace {' '.join(words)}"), help_of(*words)[-300:]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_and_option_that_is_shown_exists(page: Path) -> None:
    for words in commands(page):
        if words[0] in ("COMMAND", "--help", "--version"):
            continue
        assert words[0] in COMMANDS, f"{page.name}: headrace {' '.join(words)}"
        deeper = help_of(words[0], words[1]) if len(words) > 1 and re.fullmatch(r"[a-z][a-z-]+", words[1]) else ""
        known = help_of(words[0]) + deeper
        for option in {word.split("=")[0].strip("[]|,.") for word in words if word.startswith("--")}:
            assert option in known, f"{page.name}: {option} of headrace {' '.join(words)}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=str)
def test_python_that_is_shown_compiles_and_what_it_imports_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                root = (node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
                if root == "headrace":
                    exec(compile(ast.Module([node], []), page.name, "exec"), {})


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=str)
def test_python_that_is_shown_imports_the_public_names_and_modules_that_it_uses(page: Path) -> None:
    to_import = {*headrace.__all__, *checkpoint.__all__, *dataio.__all__, *loaders.__all__, *MODULES}
    for block in blocks(page, "python"):
        names = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Name)]
        imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Import | ast.ImportFrom)]
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        bound |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
        missing = to_import & {node.id for node in names} - bound
        assert not missing, f"{page.name}: {sorted(missing)} of the block that begins with {block.splitlines()[0]!r}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def map_of_the_code() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are\n")[2].partition("\n## ")[0]


def test_the_map_of_the_code_names_every_folder() -> None:
    code = [path.parent.relative_to(ROOT) for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py")]
    folders = {folder for folder in code if len(folder.parts) == 2 or folder.parts[:2] == ("dataio", "shards")}
    assert sorted(str(folder) for folder in folders if f"{folder.name}/" not in map_of_the_code()) == []


def test_everything_on_the_map_of_the_code_exists() -> None:
    paths = {f"/{path.relative_to(ROOT)}" for room in ROOMS for path in ROOT.glob(f"{room}/**/*")}
    paths |= {f"{path}/" for path in paths if (ROOT / path[1:]).is_dir()} | {f"/{room}/" for room in ROOMS}
    named = re.findall(r"`([\w/]+/|[\w/]+\.py)`", map_of_the_code())
    assert len(named) > 50
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []
