"""Names appear when their step is committed: SIGKILL at every named point of a save, then the framework's own resume."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest

import checkpoint.frameworks.naming
from dataio.core.crashpoints import declared
from tests import nursery

assert checkpoint.frameworks.naming
FRAMEWORKS = ("lightning", "transformers", "accelerate")
FOLDERS = ("transformers", "accelerate")
POINTS = sorted(name for name in declared() if name.startswith("name.") and name != "name.replaced")
"""Of all adapters; "name.replaced" has a test of its own."""
OWN = {"transformers": ["name.trainer-folder-written"], "accelerate": ["name.accelerate-folder-written"]}
STORED = ["ckpt.packs-written", "ckpt.before-fate", "ckpt.fate-written", "ckpt.commit-written"]
COMPLETE = {"ckpt.fate-written", "ckpt.commit-written", "name.committed", "name.named", "name.removed"}
"""Where step 4 is committed when the process dies."""
QUICK = {"ckpt.packs-written", "name.committed"}


def needs(*frameworks: str) -> None:
    for name in frameworks:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -c constraints.txt {name}")


def train(kind: str, folder: Path, *arguments: str, crash: str = "") -> dict[str, Any] | None:
    """What the training says at its end; None when it was killed at `crash`, which is asserted."""
    mark = folder / "mark"
    folder.mkdir(exist_ok=True)
    given = {"MILLRACE_CRASH": crash, "MILLRACE_CRASH_MARK": str(mark)} if crash else {}
    process = nursery.start("tests.checkpoint.frameworks.training", kind, str(folder), *arguments, **given)
    out, err = process.communicate(180)
    if crash:
        assert process.returncode == -signal.SIGKILL, out + err
        assert mark.read_text() == crash.partition("#")[0] + "\n"
        return None
    assert process.returncode == 0, err
    said: dict[str, Any] = json.loads(out.splitlines()[-1])
    return said


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of the training that is never interrupted."""
    known: dict[str, str] = {}

    def weights(kind: str) -> str:
        if kind not in known:
            said = train(kind, tmp_path_factory.mktemp(kind))
            assert said is not None
            known[kind] = said["weights"]
        return known[kind]

    return weights


def cases() -> list[Any]:
    return [
        pytest.param(kind, point, id=f"{kind}-{point}", marks=[] if point in QUICK else pytest.mark.soak)
        for kind in FRAMEWORKS
        for point in [*STORED, *POINTS, *OWN.get(kind, [])]
    ]


@pytest.mark.parametrize(("kind", "point"), cases())
def test_a_training_killed_at_any_point_of_a_save_resumes_from_the_newest_step(
    kind: str, point: str, tmp_path: Path, straight: Any
) -> None:
    needs(*FRAMEWORKS)
    # what step 4 comes to; under Lightning step 2 is saved as `step=2.ckpt` and as `last.ckpt`
    nth = 1 if point == "name.removed" else 3 if kind == "lightning" else 2
    train(kind, tmp_path / "run", crash=f"{point}#{nth}")
    said = train(kind, tmp_path / "run")
    assert said is not None
    assert said["weights"] == straight(kind)
    if kind == "lightning" and point in COMPLETE:
        assert said["resumed"] in (2, 4)  # whether `last.ckpt` was written, hidden, before the thread died
    else:
        assert said["resumed"] == (4 if point in COMPLETE else 2)
