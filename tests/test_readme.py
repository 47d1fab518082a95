"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.bench.core.data import make_clip
from headrace.checkpoint import Checkpointer
from headrace.dataio import pack

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def training_loop() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if "checkpointer.save" in block)


def run(program: str) -> dict[str, object]:
    scope: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), scope)
    return scope


def test_the_training_loop_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    for number in range(4):
        make_clip(tmp_path / "media", number, seconds=2)
    pack([str(tmp_path / "media")], str(tmp_path / "clips"))
    loop = training_loop().replace("s3://bucket", str(tmp_path)).replace("batch_size=8", "batch_size=2")
    interrupted = loop.replace("step % 100", "step % 3").replace(
        "checkpointer.save(step, state)", "checkpointer.save(step, state); raise KeyboardInterrupt"
    )
    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    assert run(loop)["step"] == 6, "the second process trains the rest of three epochs of two batches"
    assert run(loop)["step"] == 6, "the third process finds nothing left"
    with Checkpointer(tmp_path / "checkpoints", run="exp42") as checkpointer:
        assert checkpointer.steps() == [3, 6], "the last step is saved, though 100 does not divide it"


def test_the_training_loop_is_as_short_as_promised() -> None:
    code = [line for line in training_loop().splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(code) <= 15
