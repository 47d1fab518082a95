"""SIGKILL at every named point of a save, on both stores: what was committed stays, what was not is absent or complete."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

import headrace.checkpoint.saving.commit_worker
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import check, descriptions, survey
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.system import ManualClock
from tests.support import nursery
from tests.support.checkpoint_states import RUN, begin, latest, load, make, save, tiny_state

assert headrace.checkpoint.saving.commit_worker
ELSEWHERE = {"ckpt.mid-stage", "ckpt.group-written"}  # a lazy save; a large job (`repository/test_group_commit.py`)
POINTS = sorted(name for name in declared() if name.startswith("ckpt.") and name not in ELSEWHERE)
COMPLETE = {"ckpt.decision-written", "ckpt.commit-written", "ckpt.lease-deleted"}
"""From the fate on the step exists for every reader."""


def run_saver(url: str, step: int, seed: int, parent: Base | None, crash: str, mark: Path) -> None:
    """A saver that is killed at `crash`; asserts that it was, there."""
    argument = msgspec.json.encode(parent).decode() if parent else ""
    environment = {"HEADRACE_CRASH": crash, "HEADRACE_CRASH_MARK": str(mark)}
    process = nursery.start("tests.support.checkpoint_saver", url, str(step), str(seed), argument, **environment)
    _, err = process.communicate(120)
    assert process.returncode == -signal.SIGKILL, err
    assert mark.read_text() == crash + "\n"


@dataclass
class Before:
    """What was committed before the crash: steps with their bytes, and what the killed trainer restored."""

    kept: list[tuple[Base, dict[str, bytes]]]
    parent: Base | None
    step: int


def fresh(store: Store) -> Before:
    return Before([], None, 1)


def dedup(store: Store) -> Before:
    first = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    return Before([(first, tiny_state(1))], first, 2)


def again(store: Store) -> Before:
    """Step 2 was saved. Then the trainer restored step 1 and saves step 2 again."""
    before = dedup(store)
    assert before.parent is not None
    second = save(store, make(store, tiny_state(2), step=2, number=1, bases=(before.parent,)))
    return Before([*before.kept, (second, tiny_state(2))], before.parent, 2)


SCENES: dict[str, Callable[[Store], Before]] = {"fresh": fresh, "dedup": dedup, "again": again}
CASES = [(scene, point) for scene in SCENES for point in POINTS if scene == "fresh" or point != "ckpt.repo-created"]


def cases() -> Iterator[object]:
    """All on a directory; on S3 every point in one scene, in turn, and the others where time does not matter."""
    for scene, point in CASES:
        yield pytest.param(scene, point, "posix", id=f"{scene}-{point}-posix")
        turn = "fresh" if point == "ckpt.repo-created" else list(SCENES)[POINTS.index(point) % 3]
        marks = [pytest.mark.s3] if scene == turn else [pytest.mark.s3, pytest.mark.soak]
        yield pytest.param(scene, point, "s3", id=f"{scene}-{point}-s3", marks=marks)


@pytest.mark.parametrize(("scene", "point", "store_url"), list(cases()), indirect=["store_url"])
def test_a_saver_killed_at_any_point_leaves_the_step_absent_or_complete(
    scene: str, point: str, store_url: str, tmp_path: Path
) -> None:
    with open_store(store_url) as store:
        before = SCENES[scene](store)
        run_saver(store_url, before.step, 7, before.parent, point, tmp_path / "mark")
        found = latest(store)
        if point in COMPLETE:
            assert found is not None
            assert found.step == before.step
            assert load(store, found) == tiny_state(7)
            (line,) = [each for each in survey.survey(store).steps if each.base == found]
            assert line.metadata == {"seed": 7, "loss": float("inf")}
            assert descriptions.read(store, RUN, line.description) == {"config": {"seed": 7}}
        elif point == "ckpt.repo-created":
            assert found is None
        else:
            assert found == (before.kept[-1][0] if before.kept else None), "nothing is hidden before a decision"
        for base, state in before.kept:
            assert load(store, base) == state
        assert_clean(store, before, point)
        follow(store, before, found)


def test_whether_an_attempt_is_in_progress_is_judged_by_the_clock_of_the_store(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with open_store(url) as store:
        before = fresh(store)
        run_saver(url, before.step, 7, before.parent, "ckpt.manifest-written", tmp_path / "mark")

        def states(ahead: float) -> list[str]:
            clock = ManualClock()
            clock.ahead = time.time() + ahead - clock.time()
            return [unfinished.state for unfinished in check.check(store, clock=clock).unfinished]

        day = 86400.0
        assert [states(day), states(-day)] == [["in progress"], ["in progress"]]
        (lease,) = store.list("leases/")
        long_ago = time.time() - 3600
        os.utime(tmp_path / "store" / lease.key, (long_ago, long_ago))
        assert [states(day), states(-day)] == [["abandoned"], ["abandoned"]]
        assert [info.key for info in store.list("leases/")] == [lease.key]


def assert_clean(store: Store, before: Before, point: str) -> None:
    if point == "ckpt.timeline-opened" and not before.kept:
        assert check.check(store).steps == []
        return
    report = check.check(store)
    assert report.clean
    assert len(report.steps) == len(before.kept) + (point in COMPLETE)
    fateless = {"ckpt.manifest-written", "ckpt.before-decision"}
    assert [u.state for u in report.unfinished] == (["in progress"] if point in fateless else [])


def follow(store: Store, before: Before, found: Base | None) -> None:
    """The next trainer restores the latest step and saves, and objects of the killed trainer do not affect it."""
    made = make(store, tiny_state(8), step=before.step + 1, number=begin(store, found), bases=(found,) if found else ())
    after = save(store, made)
    assert latest(store) == after
    assert load(store, after) == tiny_state(8)
    assert check.check(store).clean
