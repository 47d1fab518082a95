"""Retention by a value of the metadata: a pure decision, and collections that follow it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Keep
from headrace.checkpoint.cli import _best
from headrace.checkpoint.format.documents import Decision, StepName, StepOfRun, encode, read
from headrace.checkpoint.format.metadata import Value
from headrace.checkpoint.repository import check, collect
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import Collector, retain
from headrace.checkpoint.repository.retention import best_steps, steps_to_delete
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.checkpoint_states import RUN, begin, make, save, tiny_state

VALUES = st.none() | st.booleans() | st.text(max_size=2) | st.floats() | st.integers(-3, 3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path)) as opened:
        yield opened


def visible(store: Store) -> list[int]:
    return sorted(base.step for base in repository.visible(store, RUN))


def save_with(store: Store, step: int, number: int = 1, **metadata: Value) -> None:
    save(store, make(store, tiny_state(step), step=step, number=number, metadata=metadata))


def loss_of(value: Value) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return value if is_number else None  # type: ignore[return-value]


@given(st.dictionaries(st.integers(0, 30), VALUES, max_size=20), st.integers(1, 5), st.sampled_from(["min", "max"]))
def test_the_best_steps_are_those_of_a_full_sort_in_which_newer_steps_win_ties(
    losses: dict[int, Value], count: int, order: str
) -> None:
    branch = [StepName(1, step) for step in sorted(losses, reverse=True)]
    metadata = {StepName(1, step): {"loss": value} for step, value in losses.items()}
    sign = 1 if order == "min" else -1
    numbers = [(sign * number, -step) for step, value in losses.items() if (number := loss_of(value)) is not None]
    expected = {StepName(1, -step) for _, step in sorted(numbers)[:count]}
    keep = Keep(best=("loss", count, order))
    assert best_steps(keep, branch, metadata) == expected
    removed = steps_to_delete(keep, branch, (), {}, metadata)
    assert removed == set(branch) - expected - set(branch[:1])


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=12), st.integers(1, 3))
def test_a_policy_with_a_rule_keeps_no_less_than_the_same_policy_without_it(losses: list[float], last: int) -> None:
    branch = [StepName(1, step) for step in reversed(range(len(losses)))]
    metadata = {StepName(1, step): {"loss": loss} for step, loss in enumerate(losses)}
    without = steps_to_delete(Keep(last), branch, (), {}, metadata)
    with_rule = steps_to_delete(Keep(last, best=("loss", 2, "max")), branch, (), {}, metadata)
    assert with_rule <= without


def test_integers_that_a_float_cannot_hold_are_compared_exactly() -> None:
    branch = [StepName(1, 2), StepName(1, 1)]
    metadata: dict[StepName, dict[str, Value]] = {
        StepName(1, 1): {"tokens": 2**53 + 1},
        StepName(1, 2): {"tokens": float(2**53)},
    }
    assert best_steps(Keep(best=("tokens", 1, "max")), branch, metadata) == {StepName(1, 1)}


@pytest.mark.parametrize(
    "bad",
    ["loss", ("loss", 0, "min"), ("loss", True, "min"), ("loss", 3, "least"), (("a", 1, "min"), 3), ("", 1, "min")],
)
def test_a_rule_that_makes_no_sense_is_refused(bad: object) -> None:
    with pytest.raises(UsageError, match="is not a rule"):
        Keep(best=bad)  # type: ignore[arg-type]


def test_a_rule_survives_the_record_of_a_collector() -> None:
    keep = Keep(1, best=(("loss", 3, "min"), ("score", 1, "max")))
    assert Keep.of(keep.policy) == keep
    assert Keep(best=("loss", 3, "min")) == Keep(best=(("loss", 3, "min"),))


def test_the_best_steps_and_the_newest_stay(store: Store) -> None:
    begin(store)
    for step, loss in enumerate([3.0, 1.0, math.nan, 2.0, 1.0, 5.0, 4.0], 1):
        save_with(store, step, loss=loss)
    done = retain(store, RUN, Keep(last=1, best=("loss", 2, "min")))
    assert done is not None
    assert visible(store) == [2, 5, 7]
    assert check.check(store).clean


def test_a_step_of_an_older_version_does_not_count(store: Store) -> None:
    """Its decision lacks the fields, as those of the golden files do."""
    begin(store)
    save(store, make(store, tiny_state(1), step=1))
    for step in (2, 3):
        save_with(store, step, loss=float(step))
    retain(store, RUN, Keep(best=("loss", 1, "min")))
    assert visible(store) == [2, 3]


class Counting(Wrapper):
    """Counts the reads of each kind of object."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads: list[str] = []

    def get(self, key: str, **options: object) -> bytes:
        self.reads.append(key)
        return self.inner.get(key, **options)  # type: ignore[arg-type]


def test_after_a_commit_only_the_new_decision_and_the_commits_of_the_best_steps_are_read(store: Store) -> None:
    begin(store)
    keep = Keep(last=1, best=("loss", 3, "min"))
    counting = Counting(store)
    collector = Collector(counting)
    for step in range(1, 21):
        save_with(store, step, loss=1 / step if step < 4 else float(step))
    retain(counting, RUN, keep, collector=collector)
    save_with(store, 21, loss=0.0)
    retain(counting, RUN, keep, collector=collector)
    save_with(store, 22, loss=0.5)
    counting.reads.clear()
    retain(counting, RUN, keep, collector=collector)
    assert visible(store) == [3, 21, 22]
    decisions = {key for key in counting.reads if key.endswith("fate")}
    assert len(decisions) <= 2  # of the new step, and of the step that is removed
    assert not any(key.endswith(".manifest") for key in counting.reads)


def test_the_next_best_step_stays_after_another_collection_removed_the_best(store: Store) -> None:
    """A collector that keeps settled steps in memory would count the removed step, and remove another one instead."""
    begin(store)
    for step, loss in enumerate([1.0, 2.0, 3.0, 9.0], 1):
        save_with(store, step, loss=loss)
    keep, collector = Keep(last=1, best=("loss", 2, "min")), Collector(store)
    retain(store, RUN, Keep(last=4), collector=collector)
    collect.collect(store, [StepOfRun(RUN, 1, 1)])
    assert visible(store) == [2, 3, 4]
    save_with(store, 5, loss=8.0)
    retain(store, RUN, keep, collector=collector)
    assert visible(store) == [2, 3, 5]


def test_the_command_keeps_the_best_steps(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.dataio.cli import main

    begin(store)
    for step, loss in enumerate([1.0, 2.0, 3.0], 1):
        save_with(store, step, loss=loss)
    url = store.location.url
    assert main(["ckpt", "retain", url, "--run", RUN, "--best", "loss:1:min", "--apply"]) == 0
    assert visible(store) == [1, 3]
    assert main(["ckpt", "retain", url, "--run", RUN, "--best", "loss"]) == 2
    assert "loss:3:min" in capsys.readouterr().err
    assert _best(["a:b:2:max"]) == (("a:b", 2, "max"),)


def test_a_damaged_float_of_a_decision_is_damage(store: Store) -> None:
    begin(store)
    save_with(store, 1, loss=math.inf)
    (key,) = [info.key for info in store.list("runs/") if info.key.endswith("fate")]
    document = read(store, key, Decision)
    assert document.values() == {"loss": math.inf}
    assert b'"7ff0000000000000"' in encode(document)
