"""Names appear when their step is committed: SIGKILL at every named point of a save, then the framework's own resume."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.frameworks.name_files import read_name, write_file
from headrace.checkpoint.frameworks.naming import Names
from headrace.checkpoint.handle import Handle, Name
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.core.errors import CorruptionError, TransientError, UsageError
from tests.support import nursery
from tests.support.ranks import launch

FRAMEWORKS = ("lightning", "transformers", "accelerate")
POINTS = sorted(name for name in declared() if name.startswith("name.") and name != "name.replaced")
"""Of all adapters; "name.replaced" has a test of its own."""
OWN = {"transformers": ["name.trainer-folder-written"], "accelerate": ["name.accelerate-folder-written"]}
STORED = ["ckpt.packs-written", "ckpt.before-decision", "ckpt.decision-written", "ckpt.commit-written"]
COMPLETE = {"ckpt.decision-written", "ckpt.commit-written", "name.committed", "name.named", "name.removed"}
"""Where step 4 is committed when the process dies."""
QUICK = {("transformers", "ckpt.packs-written"), *((kind, "name.committed") for kind in FRAMEWORKS)}


def needs(*frameworks: str) -> None:
    for name in frameworks:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -c constraints.txt {name}")


def train(kind: str, folder: Path, *arguments: str, crash: str = "") -> dict[str, Any] | None:
    """What the training says at its end; None when it was killed at `crash`, which is asserted."""
    mark = folder / "mark"
    folder.mkdir(exist_ok=True)
    given = {"HEADRACE_CRASH": crash, "HEADRACE_CRASH_MARK": str(mark)} if crash else {}
    process = nursery.start(f"tests.support.train_{kind}", str(folder), *arguments, **given)
    out, err = process.communicate(180)
    if crash:
        assert process.returncode == -signal.SIGKILL, out + err
        assert mark.read_text() == crash.partition("#")[0] + "\n"
        return None
    assert process.returncode == 0, err
    output: dict[str, Any] = json.loads(out.splitlines()[-1])
    return output


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of the training that is never interrupted."""
    known: dict[str, str] = {}

    def weights(kind: str) -> str:
        if kind not in known:
            output = train(kind, tmp_path_factory.mktemp(kind))
            assert output is not None
            known[kind] = output["weights"]
        return known[kind]

    return weights


def cases() -> list[Any]:
    return [
        pytest.param(kind, point, id=f"{kind}-{point}", marks=[] if (kind, point) in QUICK else pytest.mark.soak)
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
    output = train(kind, tmp_path / "run")
    assert output is not None
    assert output["weights"] == straight(kind)
    if kind == "lightning" and point in COMPLETE:
        assert output["resumed"] in (2, 4)  # whether `last.ckpt` was written, hidden, before the thread died
    else:
        assert output["resumed"] == (4 if point in COMPLETE else 2)


@pytest.mark.soak
def test_a_folder_that_is_replaced_is_the_old_or_the_new_one_after_a_kill(tmp_path: Path, straight: Any) -> None:
    """Training goes back to step 2 and saves step 4 again: its folder has another attempt then."""
    needs("transformers")
    run = tmp_path / "run"
    train("transformers", run, "2")
    shutil.copytree(run / "names" / "checkpoint-2", tmp_path / "kept")
    train("transformers", run, "4")
    shutil.copytree(tmp_path / "kept", run / "names" / "checkpoint-2")
    assert read_name(run / "names" / "checkpoint-4").attempt.timeline == 2  # type: ignore[union-attr]
    train("transformers", run, "8", "checkpoint-2", crash="name.replaced#1")
    assert not (run / "names" / "checkpoint-4").exists()
    output = train("transformers", run)
    assert output == {"resumed": 4, "weights": straight("transformers")}
    assert read_name(run / "names" / "checkpoint-8").attempt.timeline == 4  # type: ignore[union-attr]


class Later:
    """A checkpointer whose saves are committed when and in the order that a test says."""

    run = "exp"

    def __init__(self) -> None:
        self.names: dict[int, Name] = {}
        self.committed: set[str] = set()
        self.away: set[str] = set()
        self.over = False

    def save_as(self, step: int, state: dict[str, Any], name: Name | None, metadata: Metadata | None = None) -> Handle:
        attempt = Base(1, step, names.new_id())
        assert name is not None
        name.prepare(attempt)
        self.names[step] = name
        return Handle(step, attempt.attempt)

    def is_committed(self, run: str, attempt: Base) -> bool:
        if attempt.attempt in self.away:
            raise TransientError("the store is away")
        return attempt.attempt in self.committed

    def is_over(self, run: str, attempt: Base) -> bool:
        return self.over


@pytest.fixture
def later() -> Later:
    return Later()


def seen(folder: Path) -> dict[str, int]:
    return {path.name: read_name(path).step for path in folder.iterdir() if not path.name.startswith(".")}


def hidden(folder: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in folder.iterdir() if path.name.startswith("."))


def test_the_later_of_two_saves_keeps_their_name_whichever_is_committed_first(tmp_path: Path, later: Later) -> None:
    names = Names(later)  # type: ignore[arg-type]
    for step in (1, 2):
        names.save(step, {}, tmp_path / "last", write_file)
    later.names[2].publish()
    assert seen(tmp_path) == {"last": 2}
    later.names[1].publish()
    assert seen(tmp_path) == {"last": 2}
    assert hidden(tmp_path) == []


def test_an_old_name_goes_when_the_newest_save_has_its_own(tmp_path: Path, later: Later) -> None:
    names = Names(later)  # type: ignore[arg-type]
    for step in (1, 2, 3, 4):
        names.save(step, {}, tmp_path / str(step), write_file)
        names.remove(tmp_path / str(step - 1))
    later.names[1].publish()
    assert seen(tmp_path) == {"1": 1}
    later.names[3].publish()  # removes 1 and 2; 2 is not there yet
    assert seen(tmp_path) == {"3": 3}
    later.names[2].publish()
    assert seen(tmp_path) == {"3": 3}
    later.names[4].withdraw(UsageError("not saved"))
    assert seen(tmp_path) == {"3": 3}  # the name that was to replace it never came
    names.save(5, {}, tmp_path / "5", write_file)
    later.names[5].publish()
    assert seen(tmp_path) == {"5": 5}
    names.remove(tmp_path / "5")
    assert seen(tmp_path) == {}
    assert hidden(tmp_path) == []


def test_a_second_name_of_a_save_shares_its_fate(tmp_path: Path, later: Later) -> None:
    names = Names(later)  # type: ignore[arg-type]
    names.save(1, {}, tmp_path / "a", write_file)
    assert names.also(tmp_path / "b", "values")
    assert seen(tmp_path) == {}
    later.names[1].publish()
    assert names.also(tmp_path / "c", "")
    assert seen(tmp_path) == {"a": 1, "b": 1, "c": 1}
    assert read_name(tmp_path / "b").values == "values"
    names.save(2, {}, tmp_path / "d", write_file)
    assert names.also(tmp_path / "e", "")
    later.names[2].withdraw(UsageError("not saved"))
    assert not names.also(tmp_path / "f", "")
    assert seen(tmp_path) == {"a": 1, "b": 1, "c": 1}
    assert hidden(tmp_path) == []


def test_what_a_dead_process_left_hidden_is_published_if_it_was_committed(tmp_path: Path, later: Later) -> None:
    dead = Names(later)  # type: ignore[arg-type]
    for step in (1, 2, 3, 4):
        dead.save(step, {}, tmp_path / "last", write_file)
    later.names[2].publish()
    (tmp_path / ".last.ckpt.not-ours.uncommitted").write_text("")
    (tmp_path / f".last.{names.new_id()}.uncommitted").write_text("not a name")
    later.committed = {later.names[step].attempt.attempt for step in (1, 3)}  # type: ignore[attr-defined]
    Names(later).recover(tmp_path, "other")  # type: ignore[arg-type]
    assert seen(tmp_path) == {"last": 2}
    Names(later).recover(tmp_path)  # type: ignore[arg-type]
    assert seen(tmp_path) == {"last": 3}
    assert (
        hidden(tmp_path) == ["last"] * 3
    )  # a foreign file, an unreadable one, and step 4, which may still be committed
    later.names[3].publish()  # its process lives after all
    assert seen(tmp_path) == {"last": 3}
    later.over = True
    Names(later).recover(tmp_path)  # type: ignore[arg-type]
    assert hidden(tmp_path) == ["last"] * 2


def test_a_name_that_cannot_be_asked_for_or_published_stays_hidden_and_the_others_are_published(
    tmp_path: Path, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    dead = Names(later)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        dead.save(step, {}, tmp_path / str(step), write_file)
    attempts = {step: name.attempt.attempt for step, name in later.names.items()}  # type: ignore[attr-defined]
    later.committed, later.away = set(attempts.values()), {attempts[1]}
    (tmp_path / "2" / "in the way").mkdir(parents=True)
    Names(later).recover(tmp_path)  # type: ignore[arg-type]
    assert hidden(tmp_path) == ["1", "2"]
    assert read_name(tmp_path / "3").step == 3
    assert [
        record.getMessage().partition(":")[0]
        for record in caplog.records
        if "could not be published" in record.getMessage()
    ] == [f"the name {tmp_path / name} could not be published" for name in "12"]
    later.away = set()
    Names(later).recover(tmp_path, "1")  # type: ignore[arg-type]
    assert read_name(tmp_path / "1").step == 1


def test_what_fails_once_a_save_has_its_name_is_logged_and_the_rest_is_done(
    tmp_path: Path, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names(later)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    called = []

    def then() -> None:
        called.append(1)
        names.remove_now(tmp_path / "file" / "second")
        raise RuntimeError("the framework's own")

    names.save(1, {}, tmp_path / "1", write_file)
    later.names[1].publish()
    names.save(2, {}, tmp_path / "2", write_file, then)
    names.remove(tmp_path / "file" / "first")  # which is no folder: it cannot be looked into
    names.remove(tmp_path / "1")
    assert names.also(tmp_path / "lost", "")
    assert names.also(tmp_path / "also", "")
    next(tmp_path.glob(".lost.*")).unlink()
    later.names[2].publish()
    (tmp_path / "file").unlink()
    assert seen(tmp_path) == {"2": 2, "also": 2}
    assert called == [1]
    output = " ".join(record.getMessage() for record in caplog.records)
    assert all(what in output for what in ("file/first", "file/second", "the framework's own", "lost"))
    names.save(3, {}, tmp_path / "3", write_file)  # nothing of it is left in flight
    names.remove(tmp_path / "2")
    later.names[3].publish()
    assert seen(tmp_path) == {"3": 3, "also": 2}


def test_an_old_name_stays_until_a_later_save_has_its_own(tmp_path: Path, later: Later) -> None:
    names = Names(later)  # type: ignore[arg-type]
    names.save(1, {}, tmp_path / "1", write_file)
    later.names[1].publish()
    names.save(2, {}, tmp_path / "2", write_file)
    names.remove(tmp_path / "1")
    next(tmp_path.glob(".2.*")).unlink()
    with pytest.raises(UsageError, match=r"step 2 is committed, but its name .* cannot be written") as failed:
        later.names[2].publish()
    later.names[2].withdraw(failed.value)
    assert seen(tmp_path) == {"1": 1}
    names.save(3, {}, tmp_path / "3", write_file)
    later.names[3].publish()
    assert seen(tmp_path) == {"3": 3}


def test_names_of_saves_that_may_still_be_committed_are_bounded(tmp_path: Path, later: Later) -> None:
    names = Names(later)  # type: ignore[arg-type]
    for step in range(9):
        names.save(step, {}, tmp_path / str(step), write_file)
        later.names[step].withdraw(TransientError("the store is away"))
    assert hidden(tmp_path) == ["6", "7", "8"]


def test_a_name_that_cannot_be_written_fails_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
        names = Names(checkpointer)
        with pytest.raises(UsageError, match=r"step 1 is begun, but its name .*/file/name cannot be written"):
            names.save(1, {"w": b"x"}, tmp_path / "file" / "name", write_file)
        names.save(2, {"w": b"x"}, tmp_path / "name", write_file)
        names.wait()
        assert checkpointer.steps() == [2]
    assert read_name(tmp_path / "name").step == 2


@pytest.mark.parametrize(
    "text", ["", "[]", '{"headrace-step": -1}', '{"headrace-step": 1, "attempt": "x"}', "[" * 100_000, "\xff"]
)
def test_a_damaged_name_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "name").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptionError, match="does not name a step of a Headrace"):
        read_name(tmp_path / "name")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["transformers", "accelerate"])
def test_two_ranks_find_the_names_of_their_steps(kind: str, tmp_path: Path) -> None:
    needs(kind)

    def job(folder: str, stop: int) -> list[dict[str, Any]]:
        return [lines[-1] for lines in launch(2, "tests.support.named_ranks", kind, folder, str(stop))]

    whole = job(str(tmp_path / "whole"), 8)
    assert whole[0] == whole[1]
    assert [each["resumed"] for each in job(str(tmp_path / "parts"), 4)] == [0, 0]
    assert job(str(tmp_path / "parts"), 8) == [each | {"resumed": 4} for each in whole]
