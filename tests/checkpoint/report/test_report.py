"""`headrace ckpt report`: what the page shows, that it reads a limited number of objects, and hostile contents."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from headrace.bench.control_plane.repository_actions import Requests
from headrace.checkpoint import Checkpointer
from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import names
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.report import charts, reading
from headrace.checkpoint.report.charts import MOST_POINTS, Series, curve
from headrace.checkpoint.report.page import MOST_CURVES, page
from headrace.checkpoint.report.reading import read_report
from headrace.checkpoint.repository import commit, tags, timeline
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.step_usage import step_usage
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.store.open import open_store
from tests.support.browser import Browser, needs_browser
from tests.support.checkpoint_states import begin, flip, make, save, tiny_state

SECONDS = 60
EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def train(where: Path, run: str, steps: range, restored: int | None = None, publishes: bool = False) -> None:
    with Checkpointer(where, run=run, sidecar=None) as checkpointer:
        state = {"model": {"w": torch.zeros(300), "frozen": torch.ones(20_000)}}
        if restored is not None:
            checkpointer.restore(state, step=restored)
        for step in steps:
            state["model"]["w"] += step
            values: Metadata = {"loss": 1 / step, "note": EVIL, EVIL[:60]: float(step), "broken": math.nan}
            checkpointer.save(step, state, metadata=values).result(SECONDS)
        if publishes:
            checkpointer.publish("policy", "latest")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them with a fork and a failed attempt, tags and a published version."""
    where = tmp_path_factory.mktemp("report") / "store"
    train(where, "exp42", range(1, 6))
    train(where, "exp42", range(4, 8), restored=3, publishes=True)
    train(where, "other", range(1, 3))
    with open_store(str(where)) as store:
        number = timeline.followed(store, "exp42")
        attempt = Attempt("exp42", number, 9, names.new_id(), 2)
        commit.abort(store, attempt, f"rank 1 failed at https://me:hunter2@host/: {EVIL}")
        tags.tag(store, "best", "exp42", 5)
    return where


def test_the_report_has_forks_sizes_failures_tags_and_published_names(repository: Path) -> None:
    with open_store(str(repository)) as store:
        report = read_report(store)
        expected = {(each.run, each.timeline, each.step): each for each in step_usage(store)}
    exp, other = report.runs
    assert [(row.number, row.parent, row.fork, row.count, row.followed) for row in exp.timelines] == [
        (1, None, None, 5, False),
        (2, 1, 3, 5, True),
    ]
    steps = [(line.timeline, line.step, line.current) for line in exp.steps]
    assert steps == [(1, n, n <= 3) for n in range(1, 6)] + [(2, n, True) for n in range(4, 8)]
    for run in (exp, other):
        for (number, step), size in run.sizes.items():
            usage = expected[run.run, number, step]
            assert (size.unique, size.shared) == (usage.unique, usage.shared)
    assert all(line.stall is not None and line.stall > 0 for line in exp.steps)
    (failure,) = exp.failures
    assert (failure.step, failure.state) == (9, "aborted")
    assert "rank 1 failed at https://***@host/" in failure.reason
    assert [(tag.name, tag.step) for tag in report.tags] == [("best", 5)]
    ((record,),) = [each.newest for each in report.published]
    assert (record.name, record.number, record.run, record.step) == ("policy", 1, "exp42", 7)
    assert report.problems == []


def test_the_page_is_self_contained_and_escapes_names_metadata_and_reasons(repository: Path) -> None:
    with open_store(str(repository)) as store:
        text = page(read_report(store))
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;script&gt;") > 10
    tags = "".join(re.findall(r"<[^>]*>", re.sub(r'="[^"]*"', '=""', text)))
    assert not re.search(r"\b(src|href|on\w+)=", tags)
    assert not re.search(r"@import|url\(", text)
    assert "default-src 'none'" in text
    assert "hunter2" not in text
    for expected in ("from step 3 of timeline 1", "<b>best</b> is step 5", "1 failed attempt", "<b>loss</b>", "policy"):
        assert expected in text
    assert text.count("<figure>") == 2 * 5  # two runs: duration, stall, bytes, loss, and the name that is a script


def test_a_limited_number_of_steps_is_read_and_each_run_has_its_share(repository: Path) -> None:
    counted: dict[int, Counter[str]] = {}
    with open_store(str(repository)) as inner:
        for limit in (1, 4, 11):
            counted[limit] = Counter()
            report = read_report(Requests(inner, counted[limit]), steps=limit)
            read = [len(run.steps) + len(run.failures) for run in report.runs]
            assert read == {1: [1, 0], 4: [2, 2], 11: [9, 2]}[limit]
            assert report.runs[0].hidden_steps == 10 - read[0]
        assert re.search("older steps? not read", page(report))
    gets = {limit: counts["get"] for limit, counts in counted.items()}
    of_a_step = (gets[11] - gets[4]) / 7
    assert of_a_step <= 4  # COMMIT, the decision twice, and one manifest
    assert gets[1] <= 25


def test_the_number_of_requests_does_not_depend_on_the_length_of_a_run(tmp_path: Path) -> None:
    counted: dict[int, Counter[str]] = {}
    for length in (4, 12):
        with open_store(str(tmp_path / str(length))) as inner:
            number = begin(inner)
            for step in range(1, length + 1):
                save(inner, make(inner, tiny_state(step), step=step, number=number))
            counted[length] = Counter()
            read_report(Requests(inner, counted[length]), steps=4)
    assert sum(counted[4].values()) == sum(counted[12].values())


def test_manifests_of_large_jobs_are_not_read(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_MANIFESTS", 10)
    with open_store(str(repository)) as store:
        report = read_report(store)
    assert [run.sizes for run in report.runs] == [{}, {}]
    assert "unique to single steps" not in page(report)


def test_further_runs_timelines_tags_and_names_are_not_read(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_RUNS", "MOST_TIMELINES"):
        monkeypatch.setattr(reading, name, 1)
    for name in ("MOST_TAGS", "MOST_NAMES"):
        monkeypatch.setattr(reading, name, 0)
    with open_store(str(repository)) as store:
        report = read_report(store)
    ((run,), hidden) = report.runs, report.hidden_runs
    assert (run.run, run.hidden_timelines, hidden) == ("exp42", 1, 1)
    assert [row.number for row in run.timelines] == [2]
    assert (report.tags, report.published) == ([], [])
    assert "1 older timeline not read" in page(report)


def test_the_command_writes_the_page_and_json(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ckpt(["report", str(repository)]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert "exp42  2 timelines  9 steps  1 failed attempt" in capsys.readouterr().out
    assert ckpt(["report", str(repository), "--run", "other", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [line["metadata"]["broken"] for line in run["steps"]] == ["nan", "nan"]
    assert [size["step"] for size in run["sizes"]] == [1, 2]
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.parametrize("steps", ["0", "10001"])
def test_wrong_arguments_are_refused(repository: Path, tmp_path: Path, steps: str) -> None:
    with pytest.raises(UsageError, match="from 1 to 10000"):
        ckpt(["report", str(repository), "--steps", steps])
    with pytest.raises(NotFoundError, match="no such run"):
        ckpt(["report", str(repository), "--run", "exp43"])
    with pytest.raises(NotFoundError, match="no checkpoint repository"):
        ckpt(["report", str(tmp_path / "empty")])
    with pytest.raises(UsageError, match="cannot be written"):
        ckpt(["report", str(repository), "-o", str(tmp_path / "no" / "page.html")])


def test_a_damaged_step_is_shown_and_the_exit_code_is_4(tmp_path: Path) -> None:
    train(tmp_path / "store", "exp42", range(1, 3))
    (decision,) = (tmp_path / "store").glob("runs/exp42/*/*2/*/fate")
    flip(decision, 40)
    out = tmp_path / "page.html"
    assert ckpt(["report", str(tmp_path / "store"), "-o", str(out)]) == 4
    assert "Damaged" in out.read_text()


def test_a_curve_has_gaps_dots_and_a_limited_number_of_points() -> None:
    drawn = curve("loss", [Series([(1, 3.0), (2, math.nan), (3, 1.0), (4, 2.0)], True)], str)
    assert re.findall(r'class="([\w ]+)" d="([^"]*)"', drawn) == [
        ("now", "M6.0 6.0M664.7 94.0L994.0 50.0"),
        ("now dot", "M6.0 6.0h0"),
    ]
    assert "1.0 to 3.0" in drawn
    many = curve("loss", [Series([(n, float(n)) for n in range(9 * MOST_POINTS)], True)], str)
    assert many.count("L") <= MOST_POINTS
    assert str(float(9 * MOST_POINTS - 1)) in many
    assert curve("loss", [Series([(1, math.nan)], True), Series([], False)], str) == ""
    assert "nan" not in curve("loss", [Series([(1, 1e308), (2, -1e308)], False)], lambda value: "")
    assert EVIL not in curve(EVIL, [Series([(1, 2.0)], True)], lambda value: EVIL)


def test_at_most_a_few_names_of_metadata_are_drawn(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"epoch": 1}, metadata={f"value {n}": n for n in range(40)}).result(SECONDS)
    with open_store(str(tmp_path)) as store:
        text = page(read_report(store))
    assert text.count("<b>value ") == MOST_CURVES
    assert "16 more names" in text


def test_lines_of_a_fork_begin_at_the_step_of_its_parent(repository: Path) -> None:
    with open_store(str(repository)) as store:
        run = read_report(store, "exp42").runs[0]
    drawn = charts.lanes(run, lambda row: "")
    connector = re.search(r'class="now" d="M([\d.]+) 34V80"', drawn)
    assert connector is not None
    assert f"M{connector[1]} 34h0" in drawn  # the dot of step 3 of the parent
    assert drawn.count("bad dot") == 1


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_a_browser_shows_the_page_without_sideways_scrolling(
    repository: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    path = tmp_path / "page.html"
    assert ckpt(["report", str(repository), "-o", str(path)]) == 0
    with Browser(tmp_path / "profile") as browser:
        browser.look(path.as_uri(), width, 800, scheme)
        browser.wait_until("document.readyState === 'complete'")
        browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('figure svg path').length") >= 10
        assert browser.evaluate("document.querySelector('figure svg').getBoundingClientRect().width") >= 150
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 26)"
        )
        assert browser.errors == []
