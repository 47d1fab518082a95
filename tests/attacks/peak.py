"""Runs functions in a process of its own and says how much memory it came to need.

`python tests/attacks/peak.py MODULE:FUNCTION ARGUMENT...` calls the function with every argument in turn and prints a JSON
object: what each call raised, as [class, code, message], and the peak resident memory in MiB of the process and of its
children.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.dataio.core.errors import HeadraceError

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """`raised` by argument: (class, code, message), or None where nothing was raised. Memory in MiB."""

    raised: dict[str, tuple[str, str, str] | None]
    mib: float
    children_mib: float


def run(function: str, arguments: Sequence[object]) -> Outcome:
    """Call `module:function` with each argument in a new process."""
    command = [sys.executable, __file__, function, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    raised = {name: None if value is None else tuple(value) for name, value in found["raised"].items()}
    return Outcome(raised, found["self"], found["children"])


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    raised: dict[str, list[str] | None] = {}
    for argument in sys.argv[2:]:
        try:
            function(argument)
            raised[argument] = None
        except HeadraceError as error:
            raised[argument] = [type(error).__name__, error.code, str(error)]
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(json.dumps({"raised": raised, "self": _own_peak(), "children": children}))


def _own_peak() -> float:
    """MiB. Not `ru_maxrss`, which begins with what the process had that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) / 1024


if __name__ == "__main__":
    main()
