"""The test suite's GPU part: `pytest -m gpu`; without a GPU it is collected, so that it cannot rot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from headrace.bench.drill.result import PartResult

LINE = "pytest -m gpu (collected only, without a GPU)"
_ROOT = Path(__file__).resolve().parents[2]
_CLIPS = _ROOT / ".drill" / "media"
"""Real clips, where they were carried along."""
_SECONDS = 500


def files() -> list[str]:
    """The files with such tests: others may want packages that are not here."""
    marked = (path for path in (_ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    return sorted(str(path.relative_to(_ROOT)) for path in marked)


def run(gpu: bool) -> PartResult:
    """Counts of the run's last line; failures by name."""
    part = PartResult("tests", "The test suite with -m gpu")
    part.metric("passed", "passed", "1", "higher")
    part.metric("failed", "failed", "1", goal=0)
    part.metric("collected", "collected", "1", "higher")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files()]
    environ = {**({"HEADRACE_TESTS_MEDIA": str(_CLIPS)} if _CLIPS.is_dir() else {}), **os.environ}
    done = subprocess.run(
        command if gpu else [*command, "--collect-only"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environ,
    )
    out = done.stdout
    if not gpu:
        found = re.search(r"(\d+)/\d+ tests collected|(\d+) tests? collected", out)
        if found is None:
            raise RuntimeError(f"pytest collected nothing: {(out + done.stderr)[-400:]}")
        part.add("pytest -m gpu", "collected", int(found[1] or found[2]))
        return part
    if skipped := re.search(r"(\d+) skipped", out):
        part.notes.append(f"{skipped[1]} skipped: " + "; ".join(re.findall(r"^SKIPPED.*", out, re.M))[:400])
    for name in ("passed", "failed"):
        match = re.search(rf"(\d+) {name}", out)
        part.add("pytest -m gpu", name, int(match[1]) if match else 0)
    if done.returncode not in (0, 5):
        part.fail("pytest -m gpu", "\n".join(re.findall(r"^(?:FAILED|ERROR).*", out, re.M))[:400] or out[-400:])
    return part
