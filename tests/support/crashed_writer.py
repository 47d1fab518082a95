"""A writer to a directory store that is killed at a named point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def crash_writer(root: Path, point: str, action: str) -> None:
    """Run `action` on the store in a process that kills itself at `point`; asserts that it did."""
    mark = root.parent / "mark"
    program = f"from headrace.dataio.store.open import open_store\nstore = open_store({str(root)!r})\n{action}"
    environment = os.environ | {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -9
    assert mark.read_text() == point + "\n"
    mark.unlink()
