"""Points of the charts while the daemon sleeps: none is drawn, and none is missing."""

from __future__ import annotations

from collections.abc import Callable

from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.daemon import Ticker
from headrace.dataio.sidecar.job_stats import POINT_SECONDS, POINTS
from headrace.dataio.sidecar.status import StatusView


class Later:
    """A loop's `call_later` that waits for nothing."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def __call__(self, _seconds: float, action: Callable[[], None]) -> None:
        self.due.append(action)

    def pass_time(self) -> None:
        due, self.due = self.due, []
        for action in due:
            action()


def test_a_daemon_without_clients_draws_nothing_and_has_no_timer_until_a_client_comes() -> None:
    later, drawn, clients = Later(), list[int](), [1]
    pulse = Ticker(2.0, record=lambda: bool(drawn.append(1)), busy=lambda: bool(clients), later=later)
    pulse.wake()
    pulse.wake()
    assert (len(drawn), len(later.due)) == (1, 1)
    for _ in range(3):
        later.pass_time()
    assert (len(drawn), len(later.due)) == (4, 1)
    clients.clear()
    later.pass_time()
    assert (len(drawn), later.due) == (5, [])
    pulse.wake()
    assert (len(drawn), len(later.due)) == (6, 1)


def test_a_beat_follows_for_as_long_as_anything_still_moves() -> None:
    later, moves = Later(), [True, True, False]
    Ticker(2.0, record=lambda: moves.pop(0), busy=lambda: False, later=later).wake()
    later.pass_time()
    assert len(later.due) == 1
    later.pass_time()
    assert later.due == []


class Shown:
    """A view with a clock that is set by hand, and one job."""

    def __init__(self) -> None:
        self.now, self.fetched = 1000.0, 0
        self.view = StatusView(lambda: ({"fetched_bytes": self.fetched}, ()), lambda: self.now)
        self.view.job_stats.report(1, 1, m.Report(1, "g", "exp", wall=1.0, steps=0, samples=0))
        self.view.tick()

    def work(self, samples: int) -> None:
        self.now += POINT_SECONDS
        self.fetched += 1000
        self.view.job_stats.report(1, 1, m.Report(1, "g", "exp", wall=self.now - 999, steps=samples, samples=samples))
        self.view.tick()

    def ages(self) -> list[float]:
        node = self.view.history()["node"]
        assert isinstance(node, list)
        return [point["age"] for point in node]


def test_the_points_that_were_slept_through_are_there_when_somebody_asks() -> None:
    asked, ticked = Shown(), Shown()
    for shown in (asked, ticked):
        shown.work(100)
        shown.work(200)
    for _ in range(20):
        ticked.now += POINT_SECONDS
        ticked.view.tick()
    asked.now += 20 * POINT_SECONDS
    assert asked.view.history() == ticked.view.history()
    assert asked.view.status(0.0) == ticked.view.status(0.0)


def test_a_long_sleep_costs_no_more_points_than_are_kept_and_the_newest_is_of_now() -> None:
    shown = Shown()
    shown.work(100)
    shown.now += 1e6
    assert len(shown.ages()) == POINTS - 1
    assert shown.ages()[-1] == 0.0
    shown.work(200)
    assert shown.view.history()["node"][-1]["fetched_bytes_per_second"] == 100  # type: ignore[index]


def test_what_happened_in_a_gap_is_not_said_to_have_happened_at_its_end() -> None:
    shown = Shown()
    shown.now += 9 * POINT_SECONDS  # the loop was held up, and no points were drawn
    shown.work(100)
    assert shown.ages() == [0.0]
    assert shown.view.history()["node"][-1]["fetched_bytes_per_second"] == 50  # type: ignore[index]
