"""When a client looks for an answer before it sleeps."""

from __future__ import annotations

from headrace.dataio.sidecar.connection import SPIN_SECONDS, AdaptivePoll

QUICK, SLOW = SPIN_SECONDS / 2, 1.0


def after(*waits: float, processors: int = 2) -> AdaptivePoll:
    spin = AdaptivePoll(processors=processors)
    for seconds in waits:
        spin.waited(seconds, polled=spin.worth)
    return spin


def test_no_thread_looks_before_answers_were_quick() -> None:
    assert not after().worth
    assert not after(*[SPIN_SECONDS * 1.1] * 1000).worth
    assert after(*[QUICK] * 100).worth


def test_one_fetch_ends_the_looking_and_quick_answers_begin_it_again() -> None:
    assert not after(*[QUICK] * 100, SLOW).worth
    assert after(*[QUICK] * 100, SLOW, *[QUICK] * 100).worth


def test_a_reader_of_what_has_to_be_fetched_looks_once_in_vain() -> None:
    spin = after(*[QUICK] * 100)
    looked, helped = spin.polled, spin.helped
    for _ in range(50):
        spin.waited(SLOW, polled=spin.worth)
    assert (spin.polled - looked, spin.helped - helped) == (1, 0)


def test_one_processor_is_left_to_the_daemon() -> None:
    assert not after(*[QUICK] * 100, processors=1).worth
