"""One connection's state machine, without a socket."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.session import (
    HELD,
    OPENS,
    Discard,
    HangUp,
    Instruction,
    Prefetch,
    Send,
    Session,
    StartJob,
    StartOpen,
)

WHERE = m.Where("file:///data", {})


@dataclass(eq=False)
class Lease:
    file: int
    size: int = 100
    present: tuple[tuple[int, int], ...] = ((0, 10),)
    once: bool = False


def ready() -> Session:
    session = Session(7)
    assert session.received(m.Hello(m.VERSION, 1), ()) == [Send(m.Welcome(m.VERSION, 7, True, True))]
    return session


def opening(id: int, have: int = 0) -> m.Open:
    return m.Open(id, WHERE, "key", [(0, 10)], 1.0, have)


def hangs_up(instructions: list[Instruction]) -> bool:
    return isinstance(instructions[-1], HangUp)


def test_another_version_is_refused_by_name() -> None:
    refused, end = Session(7).received(m.Hello(99, 1), ())
    assert isinstance(refused, Send)
    assert isinstance(refused.message, m.Refused)
    assert "99" in refused.message.message
    assert isinstance(end, HangUp)


def test_nothing_is_understood_before_hello_or_after_the_end() -> None:
    session = Session(7)
    assert hangs_up(session.received(opening(1), ()))
    assert session.received(m.Hello(m.VERSION, 1), ()) == []


def test_a_second_hello_ends_the_connection() -> None:
    assert hangs_up(ready().received(m.Hello(m.VERSION, 1), ()))


def test_an_open_is_answered_with_the_file_and_its_descriptor() -> None:
    session, lease = ready(), Lease(5)
    assert session.received(opening(1), ()) == [StartOpen(opening(1))]
    assert session.opened(1, lease) == [Send(m.Opened(1, 5, 100, [(0, 10)]), lease)]
    assert session.opened(1, lease) == [], "answered once"


def test_a_file_that_the_client_has_is_not_sent_again() -> None:
    session, lease = ready(), Lease(5)
    session.received(opening(1), ())
    session.opened(1, lease)
    session.received(opening(2, have=5), ())
    assert session.opened(2, Lease(5)) == [Send(m.Opened(2, 5, 100, [(0, 10)]))]
    session.received(m.Closed([5]), ())
    session.received(opening(3, have=5), ())
    again = Lease(5)
    assert session.opened(3, again) == [Send(m.Opened(3, 5, 100, [(0, 10)]), again)]


def test_what_is_there_is_answered_at_once_and_held_as_if_it_had_been_begun() -> None:
    session, lease = ready(), Lease(5)
    assert session.can_open_now(opening(1))
    assert session.opened_now(opening(1), lease) == [Send(m.Opened(1, 5, 100, [(0, 10)]), lease)]
    assert session.opened_now(opening(2, have=5), Lease(5)) == [Send(m.Opened(2, 5, 100, [(0, 10)]))]
    assert (session.held, session.opens) == (1, 0)
    assert session.received(m.Closed([5]), ()) == []
    assert session.held == 0


def test_what_grew_of_other_files_that_the_client_holds_is_told_along() -> None:
    session, more = ready(), [(0, 90)]
    session.opened_now(opening(1), Lease(5))
    session.opened_now(opening(2), Lease(6))
    assert session.sent_runs == {5: ((0, 10),), 6: ((0, 10),)}
    (answer,) = session.opened_now(opening(3, have=6), Lease(6), [(5, more), (6, more)])
    assert answer == Send(m.Opened(3, 6, 100, [(0, 10)], also=[(5, more)]))
    assert session.sent_runs[5] is more, "and not told again"
    session.received(m.Closed([5]), ())
    assert 5 not in session.sent_runs
    (answer,) = session.opened_now(opening(4, have=6), Lease(6), [(5, more)])
    assert answer == Send(m.Opened(4, 6, 100, [(0, 10)])), "it was closed"
    session.end()
    assert not session.sent_runs


def test_an_open_that_is_not_in_order_is_not_answered_at_once() -> None:
    assert not Session(7).can_open_now(opening(1)), "there was no handshake"
    session = ready()
    session.received(opening(1), ())
    assert not session.can_open_now(opening(1)), "its id is in use"
    for n in range(2, OPENS + 1):
        session.received(opening(n), ())
    assert not session.can_open_now(opening(OPENS + 1)), "too many are in progress"
    session.end()
    assert not session.can_open_now(opening(99))


def test_a_file_is_held_until_it_is_closed_as_often_as_it_was_sent() -> None:
    session = ready()
    for id in (1, 2):
        session.received(opening(id), ())
        session.opened(id, Lease(5))
    assert session.received(m.Closed([5]), ()) == []
    assert session.dropped(5) == [Send(m.Forget(5))]
    assert session.received(m.Closed([5]), ()) == []
    assert session.held == 0
    assert session.dropped(5) == []
    assert hangs_up(session.received(m.Closed([5]), ()))


def test_the_number_of_opens_is_bounded() -> None:
    session = ready()
    for id in range(OPENS):
        session.received(opening(id), ())
    (refused,) = session.received(opening(1000), ())
    assert isinstance(refused, Send)
    assert isinstance(refused.message, m.Failed)
    assert refused.message.code == "capacity"
    assert hangs_up(session.received(opening(3), ()))


def test_the_number_of_held_files_is_bounded() -> None:
    session = ready()
    for file in range(HELD):
        session.received(opening(file), ())
        session.opened(file, Lease(file))
    session.received(opening(5000), ())
    (refused,) = session.opened(5000, Lease(5000))
    assert isinstance(refused, Send)
    assert isinstance(refused.message, m.Failed)
    assert refused.lease is None
    assert session.held == HELD
    session.received(m.Closed([7]), ())
    session.received(opening(5001), ())
    (answer,) = session.opened(5001, Lease(5001))
    assert isinstance(answer, Send)
    assert answer.lease is not None


def test_a_late_answer_is_dropped() -> None:
    session = ready()
    session.received(opening(1), ())
    (open_timed_out,) = session.open_timed_out(1)
    assert isinstance(open_timed_out, Send)
    assert isinstance(open_timed_out.message, m.Failed)
    assert open_timed_out.message.code == "deadline"
    assert session.opened(1, Lease(5)) == []
    assert session.held == 0


def announced(keys: str, dropped: int | None = None) -> m.Announce:
    return m.Announce(WHERE, [(key, 0, 1) for key in keys], dropped=dropped)


def test_an_announcement_that_goes_on_is_followed_as_the_whole_list() -> None:
    session = ready()
    assert session.received(announced("abc"), ()) == [Prefetch(announced("abc"))]
    assert session.received(announced("de", dropped=2), ()) == [Prefetch(announced("cde"))]
    assert session.received(announced("", dropped=1), ()) == [Prefetch(announced("de"))]
    assert session.received(announced("x"), ()) == [Prefetch(announced("x"))]


def test_an_announcement_that_goes_on_from_none_or_to_too_many_ends_the_connection() -> None:
    assert hangs_up(ready().received(announced("a", dropped=0), ()))
    elsewhere, long = ready(), ready()
    elsewhere.received(announced("a"), ())
    assert hangs_up(elsewhere.received(m.Announce(m.Where("file:///other", {}), [("b", 0, 1)], dropped=0), ()))
    long.received(announced("a" * m.RANGES), ())
    assert long.received(announced("b", dropped=1), ()) == [Prefetch(announced("a" * (m.RANGES - 1) + "b"))]
    assert hangs_up(long.received(announced("b", dropped=0), ()))


def test_a_failure_goes_to_the_one_who_asked() -> None:
    session = ready()
    session.received(opening(1), ())
    assert session.open_failed(1, NotFoundError("gone")) == [Send(m.Failed(1, "not_found", "gone", ""))]


def test_no_room_is_said() -> None:
    session = ready()
    session.received(opening(1), ())
    assert session.opened(1, None) == [Send(m.Bypassed(1))]


def test_a_stage_takes_two_descriptors_and_nothing_else_takes_any() -> None:
    assert ready().received(m.Stage(1, "checkpoint"), (8, 9)) == [StartJob(1, "checkpoint", 8, 9)]
    discard, refused = ready().received(m.Stage(1, "checkpoint"), (8,))
    assert discard == Discard((8,))
    assert isinstance(refused, Send)
    instructions = ready().received(m.AskStatus(1), (8,))
    assert instructions[0] == Discard((8,))
    assert hangs_up(instructions)
    instructions = Session(7).received(m.Stage(1, "checkpoint"), (8, 9))
    assert instructions[0] == Discard((8, 9))
    assert hangs_up(instructions)


messages = st.one_of(
    st.builds(m.Hello, st.integers(0, 2), st.just(1)),
    st.builds(opening, st.integers(0, 5), st.integers(0, 3)),
    st.builds(m.Closed, st.lists(st.integers(0, 3), max_size=3)),
    st.builds(m.Stage, st.integers(0, 5), st.just("x")),
    st.builds(m.AskStatus, st.integers(0, 5)),
)


@given(st.booleans(), st.lists(st.tuples(messages, st.integers(0, 2)), max_size=30), st.data())
def test_whatever_comes_every_descriptor_has_one_fate_and_every_open_one_answer(
    greeted: bool, script: list[tuple[m.FromClient, int]], data: st.DataObject
) -> None:
    session, next_fd, pending, sent = (ready() if greeted else Session(7)), 100, set[int](), 0
    for message, count in script:
        descriptors = tuple(range(next_fd, next_fd + count))
        next_fd += count
        fates: list[int] = []
        for instruction in session.received(message, descriptors):
            match instruction:
                case Discard(fds):
                    fates += fds
                case StartJob(_, _, arena, plan):
                    fates += (arena, plan)
                case StartOpen(request):
                    assert request.id not in pending
                    pending.add(request.id)
                case HangUp():
                    pending.clear()
        assert sorted(fates) == list(descriptors)
        if len(pending) > 0 and data.draw(st.booleans()):
            id = pending.pop()
            (answer,) = session.opened(id, Lease(data.draw(st.integers(0, 3))))
            assert isinstance(answer, Send)
            sent += answer.lease is not None
    session.end()
    assert session.held == 0
