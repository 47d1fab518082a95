"""SIGKILL of a worker with a tier at every named point: the step is absent, or becomes one whole; never a part of one."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace.checkpoint.saving.commit_worker
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import check
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.tier import restoring, saving
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.store.local_tier.stores import TierReader
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.checkpoint_states import RUN, begin, latest, load, make, tiny_state
from tests.support.local_tier import local_tier

assert headrace.checkpoint.saving.commit_worker
POINTS = [
    "ckpt.lease-written",
    "ckpt.in-pack",
    "ckpt.first-pack",
    "ckpt.packs-written",
    "ckpt.arena-released",
    "ckpt.manifest-written",
    "ckpt.before-decision",
    "ckpt.decision-written",
    "ckpt.commit-written",
    "ckpt.lease-deleted",
]
KEPT = set(POINTS[4:])
"""From here on the tier has all of it: the next restore makes it a step, whatever the store has."""


def test_every_point_is_one_that_exists() -> None:
    assert set(POINTS) <= set(declared())


@pytest.mark.parametrize("point", POINTS)
def test_what_a_killed_worker_left_is_finished_or_absent(tmp_path: Path, point: str) -> None:
    url, tier, mark = tmp_path / "store", local_tier(tmp_path, steps=3), tmp_path / "mark"
    with open_store(url) as store:
        made = make(store, tiny_state(1), step=1, number=begin(store))
        commit_staged(made.arena, made.plan, lambda _: None, store=store, local_tier=tier)
        first = Base(1, 1, made.plan.attempt)
        environment = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
        done = nursery.run("tests.support.tier_saver", str(url), str(tier.root), **environment)
        assert done.returncode == -9, done.stderr
        assert mark.read_text() == point + "\n"
        assert any(r.step == 2 for r in tier.records()) == (point in KEPT)
        sent = restoring.send_unfinished(store, tier, RUN, lambda _source, _key: False)
        restoring.commit_unfinished(store, tier, sent)
        found = latest(store)
        assert found is not None
        assert found.step == (2 if point in KEPT else 1)
        for base, seed in ((first, 1), (found, found.step)):
            assert load(store, base) == load(TierReader(store, tier, saving.may_hold), base) == tiny_state(seed)
        assert check.check(store).clean
        assert all(r.committed for r in tier.records())
