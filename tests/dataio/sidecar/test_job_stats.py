"""Reports put together: goodput, totals that only grow, bounds."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.job_stats import (
    CHARTS,
    FORGET_SECONDS,
    JOBS,
    OTHER,
    POINTS,
    SOURCES,
    JobStats,
    Totals,
)
from headrace.dataio.sidecar.status import fitting


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def loader(source: int = 1, group: str = "group", **totals: float) -> m.Report:
    return m.Report(source, group, **totals)  # type: ignore[arg-type]


def board() -> tuple[JobStats, Time]:
    time = Time()
    return JobStats(time), time


def only(found: JobStats) -> dict[str, object]:
    (job,) = found.jobs(2000.0)
    return job


def test_goodput_is_what_is_left_of_wall_time_after_waits_and_stalls() -> None:
    made, time = board()
    made.report(1, 50, loader(wall=0.001))
    made.tick()
    time.now += 10
    made.report(1, 50, loader(wall=10.001, wait=1.0, steps=20, samples=160, read=1000))
    made.report(2, 50, m.Report(2, "group", "exp", stall=2.0, saves=1, step=7, committed=1990.0))
    made.waited(50, 250)
    job = only(made)
    assert job["job"] == "exp"
    assert job["trainers"] == 1
    assert job["goodput"] == 0.7
    assert job["samples_per_second"] == 16.0
    assert (job["wait_ms_per_step"], job["stall_ms_per_step"], job["compute_ms_per_step"]) == (50.0, 100.0, 350.0)
    assert (job["cache_bytes_per_second"], job["store_bytes_per_second"], job["hit_ratio"]) == (75, 25, 0.75)
    assert (job["last_step"], job["last_commit_age_seconds"]) == (7, 10.0)


def test_a_lost_or_repeated_or_overtaken_report_changes_nothing() -> None:
    reports = [loader(wall=float(t), wait=t / 10, steps=t, samples=8 * t) for t in range(1, 6)]
    found = []
    for received in (reports, reports[-1:], [*reports, reports[-1], reports[0]]):
        made, time = board()
        for report in received:
            made.report(1, 50, report)
        time.now += 1
        found.append(made.totals()["group"])
    assert [(t.steps, t.samples, t.wait) for t in found] == [(5, 40, 0.5)] * 3


def test_two_loaders_of_one_process_do_not_double_its_time() -> None:
    made, time = board()
    for now in (0.0, 10.0):
        time.now = 1000 + now
        made.report(1, 50, loader(1, wall=now + 0.5, wait=1.0, steps=1))
        made.report(2, 50, loader(2, wall=now + 0.2, wait=2.0, steps=1))
    total = made.totals()["group"]
    assert round(total.wall, 6) == 10.5
    assert total.wait == 3.0


def test_a_process_that_ends_keeps_its_totals_and_one_that_returns_is_not_counted_twice() -> None:
    made, _ = board()
    made.report(1, 50, loader(wall=4.0, steps=4))
    made.ended(1, 50)
    assert made.totals()["group"].steps == 4
    assert only(made)["trainers"] == 0
    made.report(2, 50, loader(wall=5.0, steps=5))
    assert made.totals()["group"].steps == 5
    made.ended(2, 50)
    made.report(3, 50, loader(9, wall=1.0, steps=1))  # another process with the same number
    assert made.totals()["group"].steps == 6


def test_a_job_is_forgotten_some_time_after_its_last_process() -> None:
    made, time = board()
    made.report(1, 50, loader(wall=1.0))
    time.now += 10 * FORGET_SECONDS
    made.tick()
    made.ended(1, 50)
    assert only(made)["job"] == "group"
    time.now += FORGET_SECONDS + 1
    made.tick()
    assert made.jobs(0.0) == []


def test_more_than_32_jobs_are_shown_and_counted() -> None:
    made, time = board()
    for n in range(100):
        made.report(n, n, loader(group=f"job{n:03}", wall=1.0, steps=n))
    made.tick()
    time.now += 2
    made.tick()
    assert [job["job"] for job in made.jobs(0.0)] == [f"job{n:03}" for n in range(100)]
    assert [job["trainers"] for job in made.jobs(0.0)] == [1] * 100
    assert {name: total.steps for name, total in made.totals().items()} == {f"job{n:03}": n for n in range(100)}
    assert made.known == 100
    assert len(made.history()) == CHARTS, "whose charts fit into an answer"


def test_a_full_list_of_jobs_makes_room_from_those_that_ended() -> None:
    made, time = board()
    for n in range(JOBS):
        made.report(n, n, loader(group=f"job{n:03}", wall=1.0, steps=1))
        time.now += 0.1
    made.ended(5, 5)
    made.ended(9, 9)
    made.report(1000, 1000, loader(group="new", wall=1.0, steps=7))
    names = {str(job["job"]) for job in made.jobs(0.0)}
    assert names == {f"job{n:03}" for n in range(JOBS) if n != 5} | {"new"}
    made.report(1001, 1001, loader(group="newer", wall=1.0, steps=7))
    made.report(1002, 1002, loader(group="newest", wall=1.0, steps=9))
    assert made.totals()[OTHER].steps == 9, "no other job has ended"
    assert made.totals()["newer"].steps == 7


def test_names_sources_and_history_are_bounded() -> None:
    made, time = board()
    for n in range(3 * JOBS):
        made.report(n, n, loader(group=f"job\n{n}", wall=1.0, steps=1))
    names = {str(job["job"]) for job in made.jobs(0.0)}
    assert len(names) == JOBS + 1
    assert OTHER in names
    assert "job0" in names
    assert sum(total.steps for total in made.totals().values()) == 3 * JOBS
    for n in range(SOURCES + 10):
        made.report(0, 0, loader(1000 + n, group="job0", wall=1.0, steps=1))
    assert made.totals()["job0"].steps == SOURCES
    for _ in range(2 * POINTS):
        time.now += 2
        made.tick()
    assert len(made.history()["job0"]) == POINTS - 1


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 2),
            st.floats(0, 1e6),
            st.floats(0, 1e6),
            st.integers(0, 1 << 50),
            st.sampled_from(["", "run"]),
            st.sampled_from(["report", "report", "end", "tick", "wait"]),
        ),
        max_size=40,
    )
)
def test_whatever_is_reported_shares_lie_between_0_and_1_and_it_is_fit_for_json(
    output: list[tuple[int, int, float, float, int, str, str]],
) -> None:
    made, time = board()
    for process, source, wall, other, count, run, what in output:
        time.now += 1
        if what == "report":
            report = m.Report(source, "g", run, wall, other, other, count, count, count, other, count, count, other)
            made.report(process, process, report)
        elif what == "end":
            made.ended(process, process)
        elif what == "wait":
            made.waited(process, count)
        else:
            made.tick()
    json.dumps([made.jobs(1e9), made.history()], allow_nan=False)
    for job in made.jobs(1e9):
        for name in ("goodput", "hit_ratio", "goodput_since_start"):
            share = job[name]
            assert share is None or (isinstance(share, float | int) and 0 <= share <= 1)
    assert all(min(t.wall, t.wait, t.compute, t.steps) >= 0 for t in made.totals().values())
    assert made.totals().get("none", Totals()) == Totals()


def test_a_status_is_cut_to_what_a_message_holds() -> None:
    status: dict[str, object] = {"errors": ["é" * 300] * 300, "jobs": {"jobs": ["x" * 100] * 300}, "pid": 1}
    text = fitting(status, 60_000)
    assert len(text.encode()) <= 60_000
    assert json.loads(text)["errors"]
    assert fitting({"pid": 1, "list": [1, 2]}, 60_000) == '{"pid": 1, "list": [1, 2]}'
