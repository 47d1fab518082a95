"""The oracle itself: a history that is right passes, and every kind of loss is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.histories.oracle import Found, Seen, judge


def line(event: str, **about: Any) -> dict[str, Any]:
    return {"event": event, **about}


def saved(nonce: int, step: int, parent: int | None, trainer: str = "a", timeline: int = 1) -> list[dict[str, Any]]:
    about = {"nonce": nonce, "run": "r", "step": step, "trainer": trainer, "parent": parent, "node": "n"}
    ended = {"timeline": timeline, "attempt": f"at{nonce}"} if timeline else {}
    return [line("saving", **about), *([line("committed", nonce=nonce, **ended)] if timeline else [])]


STAGED = [
    line("saving", nonce=14, run="r", step=4, trainer="b", parent=13, node="n"),
    line("staged", nonce=14, attempt="at14"),
]
HISTORY = [
    line("restored", trainer="a", run="r", asked=None),
    *saved(11, 1, None),
    *saved(12, 2, 11),
    line("tagging", name="best", nonce=12),
    line("tagged", name="best", nonce=12),
    line("restored", trainer="b", run="r", asked="latest"),
    *saved(13, 3, 12, "b", 2),
    *STAGED,
]


def seen(**changes: Any) -> Seen:
    right: dict[str, Any] = {
        "branch": {"r": [Found(2, 4, 14), Found(2, 3, 13), Found(1, 2, 12), Found(1, 1, 11)]},
        "stored": {("r", 1, 1, "at11"), ("r", 1, 2, "at12"), ("r", 2, 3, "at13"), ("r", 2, 4, "at14")},
        "tags": {"best": 12},
    }
    return Seen(**right | changes)


def test_a_history_in_which_nothing_is_lost_passes() -> None:
    assert judge(HISTORY, seen()) == []


def branch(*found: Found) -> dict[str, list[Found]]:
    return {"r": list(found)}


ALL = (Found(2, 4, 14), Found(2, 3, 13), Found(1, 2, 12), Found(1, 1, 11))
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a chunk is damaged": ({"problems": ["pack 0"]}, "pack 0"),
    "bytes of no save": ({"branch": branch(*ALL[:2], Found(1, 2, None), ALL[3])}, "no save wrote"),
    "bytes of another step": ({"branch": branch(ALL[0], Found(2, 3, 11))}, "holds what step 1"),
    "the newest step is lost": ({"branch": branch(*ALL[2:])}, "ends at step 2 of timeline 1; step 3"),
    "the run went back": ({"branch": branch(Found(2, 2, 12), ALL[3])}, "ends at step 2"),
    "an old step is lost": ({"branch": branch(*ALL[:2], ALL[3])}, "step 2 of timeline 1 was committed and is gone"),
    "all is lost": ({"branch": {}}, "has no step"),
    "a tag is lost": ({"tags": {}}, "tag best is gone"),
    "a tag went back": ({"tags": {"best": 11}}, "tag best names 11"),
    "a staged step is lost": ({"branch": branch(*ALL[1:]), "stored": {("r", 2, 3, "at13")}}, "took it over"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_every_loss_is_found(kind: str) -> None:
    changes, words = WRONG[kind]
    assert any(words in what for what in judge(HISTORY, seen(**changes)))


def test_a_newer_timeline_hides_a_step_only_when_its_trainer_could_not_know_it() -> None:
    hidden = branch(Found(3, 3, 21), Found(1, 2, 12), Found(1, 1, 11))
    late = [*HISTORY, line("restored", trainer="c", run="r", asked="latest"), *saved(21, 3, 12, "c", 0)]
    assert any("hides step 3" in what for what in judge(late, seen(branch=hidden)))
    chosen = [*HISTORY, line("restored", trainer="c", run="r", asked=2), *saved(21, 3, 12, "c", 0)]
    assert judge(chosen, seen(branch=hidden)) == []


def test_a_run_may_end_at_an_older_step_only_after_a_trainer_chose_it() -> None:
    back = seen(branch=branch(*ALL[2:]))
    begun = saved(31, 3, 12, "d", 0)
    assert judge([*HISTORY, line("restored", trainer="d", run="r", asked="latest"), *begun], back) != []
    assert judge([*HISTORY, line("restored", trainer="d", run="r", asked=2), *begun], back) == []


def test_a_policy_may_remove_old_steps_and_not_the_newest_ones() -> None:
    lines = [*HISTORY, line("policy", run="r", last=2)]
    assert judge(lines, seen(branch=branch(Found(2, 4, 14), Found(2, 3, 13)))) == []
    lines = [*HISTORY, line("policy", run="r", last=3)]
    assert judge(lines, seen(branch=branch(Found(2, 4, 14), Found(2, 3, 13)))) != []
