"""The list of staged checkpoints: their progress, their outcomes, and the bound on those that ended."""

from __future__ import annotations

from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.save_stats import KEPT, SaveStats


def test_a_save_is_followed_to_its_end_and_its_step_is_remembered() -> None:
    steps: list[tuple[str, int, float]] = []
    saves = SaveStats(lambda *found: steps.append(found), lambda: 100.0)
    received = saves.listener("t", "exp, step 3")
    received(m.Progress("t", 5, 10))
    assert (saves.listed()[0]["state"], saves.listed()[0]["done"]) == ("sending", 5)
    received(m.Released("t"))
    assert saves.listed()[0]["state"] == "committing"
    received(m.Done("t", '{"run": "exp", "step": 3, "committed": 99.5}'))
    assert saves.listed()[0]["state"] == "committed"
    assert steps == [("exp", 3, 99.5)]
    saves.listener("u", "")(m.Done("u", '{"run": 5, "step": -1, "committed": "no"}'))
    saves.listener("v", "")(m.JobFailed("v", "transient", "the store is gone"))
    assert saves.listed()[0]["error"] == "the store is gone" or saves.listed()[-1]["error"] == "the store is gone"
    assert steps == [("exp", 3, 99.5)]
    assert saves.outcomes == {"committed": 2, "failed": 1}


def test_ended_saves_are_forgotten_and_those_in_flight_are_not() -> None:
    saves = SaveStats(lambda *_: None)
    saves.listener("flying", "in flight")
    for n in range(3 * KEPT):
        saves.listener(str(n), "")(m.JobFailed(str(n), "transient", "no"))
    listed = saves.listed()
    assert len(listed) == KEPT + 1
    assert listed[0]["about"] == "in flight"
