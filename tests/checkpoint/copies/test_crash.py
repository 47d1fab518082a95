"""SIGKILL at every named point of a copy, on both stores: a step of the copy is absent or complete, and the next copy ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace.checkpoint.copies.copy
from headrace.checkpoint.copies.copy import COPIED, PRESENT, copy
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import check, tags
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.checkpoint_states import RUN, latest
from tests.support.copied_runs import assert_copied, filled

assert headrace.checkpoint.copies.copy
COMMON = ["ckpt.repo-created", "ckpt.before-decision", "ckpt.decision-written", "ckpt.commit-written"]
POINTS = sorted(name for name in declared() if name.startswith("copy.")) + COMMON
BEFORE_STEPS = {"copy.one-timeline", "copy.timelines", "ckpt.repo-created"}
ON_S3 = {"copy.pack", "copy.manifest", "ckpt.decision-written"}
COMPLETE = {"copy.lease-deleted", "ckpt.decision-written", "ckpt.commit-written"}


def cases() -> Iterator[object]:
    """Every point on a directory, at the second step; some on S3, at the first step."""
    for point in POINTS:
        yield pytest.param(point, 1 if point in BEFORE_STEPS else 2, "posix", id=f"{point}-posix")
        marks = [pytest.mark.s3] if point in ON_S3 else [pytest.mark.s3, pytest.mark.soak]
        yield pytest.param(point, 1, "s3", id=f"{point}-s3", marks=marks)


@pytest.mark.parametrize(("point", "nth", "store_url"), list(cases()), indirect=["store_url"])
def test_a_copy_that_is_killed_leaves_each_step_absent_or_complete_and_continues(
    point: str, nth: int, store_url: str, tmp_path: Path
) -> None:
    with open_store(str(tmp_path / "source")) as source, open_store(store_url) as store:
        bases = filled(source)
        tags.tag(source, "best", RUN, 2)
        environment = {"HEADRACE_CRASH": f"{point}#{nth}", "HEADRACE_CRASH_MARK": str(tmp_path / "mark")}
        process = nursery.start("tests.support.checkpoint_copier", str(tmp_path / "source"), store_url, **environment)
        _, error = process.communicate(120)
        assert process.returncode == -signal.SIGKILL, error
        assert (tmp_path / "mark").read_text() == point + "\n"
        found = latest(store)
        if point in BEFORE_STEPS:
            assert found is None
        elif point != "copy.in-pack":  # a step has several chunks
            complete = nth if point in COMPLETE else nth - 1
            assert (found.step if found else 0) == complete
        if repository.read_repo(store) is not None:
            assert check.check(store).clean
        before = {info.key: info.modified for info in store.list(names.PACKS)}
        report = copy(source, store, run=RUN, tags=True)
        assert {each.state for each in report.steps} <= {COPIED, PRESENT}
        assert_copied(source, store)
        assert tags.find(store, "best").step == 2
        assert latest(store) is not None
        after = {info.key: info.modified for info in store.list(names.PACKS)}
        assert before.items() <= after.items(), "complete packs are not sent again"
        assert len(after) == len(bases)
        if point not in {"ckpt.decision-written", "ckpt.commit-written"}:  # a lease of a committed step expires
            assert list(store.list(names.LEASES)) == []
