"""Runs a script of examples/migrate in this process, as `python examples/migrate/SCRIPT ARGUMENTS` does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "migrate"
RECORDED = Path(__file__).parents[1] / "examples" / "recorded"
"""Data sets that the libraries themselves wrote."""


def run_script(script: str, *arguments: object) -> int:
    """Run the script, and return its exit code. Its errors are raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        try:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            sys.modules.pop("tars", None)
    return 0
