"""How long a failed checkpoint is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.sidecar.jobs.schedule import RetrySchedule


@given(st.integers(1, 10_000), st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_a_pause_is_bounded_and_the_last_try_begins_at_the_limit(failures: int, elapsed: float, draw: float) -> None:
    patience = RetrySchedule(limit=3600.0, first=1.0, longest=60.0)
    pause = patience.pause(failures, elapsed, draw)
    if elapsed >= 3600:
        assert pause is None
    else:
        assert pause is not None
        assert 0 < pause <= 60
        assert elapsed + pause <= 3600.001


@given(st.floats(0.5, 1e5), st.floats(0, 1, exclude_max=True))
def test_a_store_that_never_returns_is_asked_a_bounded_number_of_times(limit: float, draw: float) -> None:
    patience, elapsed, tries = RetrySchedule(limit), 0.0, 1
    while (pause := patience.pause(tries, elapsed, draw)) is not None:
        elapsed, tries = elapsed + pause, tries + 1
    assert limit / 60 <= tries <= 16 + limit / 30


def test_the_pauses_grow() -> None:
    pauses = [RetrySchedule().pause(failures, 0.0, 0.5) for failures in (1, 2, 3, 7, 20)]
    assert pauses == [0.75, 1.5, 3.0, 45.0, 45.0]


def test_without_patience_nothing_is_tried_again() -> None:
    assert RetrySchedule(limit=0.0).pause(1, 0.0, 0.5) is None
