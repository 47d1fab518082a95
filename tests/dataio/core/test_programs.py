"""Programs of Headrace import the same Headrace as this process, and nothing from the current directory."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

import headrace
from headrace.dataio.core import programs

HOME = str(Path(headrace.__file__).parents[1])


def test_a_program_ignores_modules_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "blake3.py").write_text("raise OSError")
    (tmp_path / "headrace").mkdir()
    command = programs.run_module("headrace.dataio.cli", "--version")
    done = subprocess.run(command, env=programs.environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("headrace "), done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, [HOME]), ("", [HOME]), (f"{os.pathsep}/a{os.pathsep}{os.pathsep}/b", [HOME, "/a", "/b"])],
)
def test_the_folder_of_a_checkout_is_named_and_empty_entries_are_left_out(
    given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    assert programs.environment()["PYTHONPATH"].split(os.pathsep) == expected


def test_an_installed_package_is_not_put_before_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: HOME)
    assert "PYTHONPATH" not in programs.environment()
