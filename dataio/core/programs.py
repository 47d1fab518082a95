"""Commands that run a module of Headrace in another process.

Invariant: such a process never imports from the current directory, where a `numpy.py` may lie. It imports the same
Headrace as this process, also from a checkout.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

import headrace


def run_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs this module with these arguments. Start it with `environment`."""
    return (sys.executable, "-P", "-m", module, *arguments)


def environment() -> dict[str, str]:
    """The variables of this process, for a command of `run_module`.

    PYTHONPATH names the folder of Headrace, if Python does not find it otherwise. An empty entry, which means the
    current directory, is left out.
    """
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    home = str(Path(headrace.__file__).parents[1])
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()):
        folders.insert(0, home)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return variables | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})
