"""Public names that load their modules on first use: every package that has such says them alike everywhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

from headrace.dataio.core.imports import exports

PACKAGES = ("headrace", "headrace.dataio", "headrace.loaders", "headrace.checkpoint", "headrace.checkpoint.dcp")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_its_names_alike_to_people_programs_and_type_checkers(name: str) -> None:
    package = importlib.import_module(name)
    star: dict[str, object] = {}
    exec(f"from {name} import *", star)
    typed = [
        alias.name
        for node in ast.walk(ast.parse(inspect.getsource(package)))
        if isinstance(node, ast.If)
        for one in node.body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    ]
    assert sorted(package.__all__) == dir(package) == sorted(typed) == sorted(star.keys() - {"__builtins__"})
    with pytest.raises(AttributeError, match=rf"module '{name}' has no attribute 'Nothing'"):
        _ = package.Nothing


def test_a_package_of_lazy_names_imports_none_of_their_modules() -> None:
    code = (
        f"import sys, {', '.join(PACKAGES)}\n"
        "print(sorted(name for name in sys.modules if name.startswith(('headrace', 'torch', 'numpy'))))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150).stdout
    assert ast.literal_eval(out) == sorted(
        [*PACKAGES, *(f"headrace.dataio.core{one}" for one in ("", ".errors", ".imports", ".redact"))]
    )


def test_a_name_is_looked_up_in_its_module_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    get, names = exports("some", {"dumps": "json", "Fraction": "fractions"})
    assert names() == ["Fraction", "dumps"]
    monkeypatch.setattr("json.dumps", "another")
    assert get("dumps") == "another"
