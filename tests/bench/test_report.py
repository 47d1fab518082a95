"""The report, as text and in a real browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.core.measure import Latencies
from headrace.bench.core.results import Metric, Part, Run, Samples, write
from headrace.bench.core.table import markdown
from headrace.bench.report.charts import Point, bars, curves
from headrace.bench.report.cli import report
from headrace.bench.report.page import page
from headrace.bench.workloads.store_sweep import Sweep, metrics
from tests.support.browser import Browser, needs_browser

SHOTS = os.environ.get("HEADRACE_SCREENSHOTS")
EVIL = "<script>alert(1)</script>"
COLOURS = {"light": {"c0": (0x0B, 0x53, 0x94), "c1": (0xD5, 0x5E, 0x00)}, "dark": {"c0": (0x79, 0xC0, 0xFF)}}


def swept() -> Part:
    """A sweep as the store's benchmark leaves it, with figures that a test can find again."""
    sweep = Sweep(("get", "list"), (4096, 1 << 20), (1, 4, 16))
    part = Part("store", "Store", metrics=metrics(sweep.cells()), against="s3fs", settings={"url": EVIL})
    for number, name in enumerate(("headrace", "s3fs")):
        found = part.candidates[name] = Samples()
        for cell in sweep.cells():
            rate = 100.0 * (2 - number) * cell.width**0.5
            found.metrics[cell.name] = [rate * 0.9, rate, rate * 1.2]
            for share in ("p50", "p99", "p999"):
                found.metrics[f"{cell.name}_{share}"] = [2.0 * cell.width]
            if cell.size:
                found.metrics[f"{cell.name}_cpu"] = [1.0]
            latencies = Latencies()
            for tick in range(2000):
                latencies.add(1e-3 * (1 + tick % 7) * (100 if tick % 500 == 0 else 1))
            found.histograms[cell.name] = latencies.pairs()
    return part


def beside() -> Part:
    about = {
        "mb_s": Metric("MB/s", "MB/s", "higher", limit=2000, limit_why="memcpy in the same run"),
        "stall": Metric("stall", "s", goal=0.2),
    }
    found = {
        "headrace": Samples({"mb_s": [1000.0, 1100.0, 1300.0], "stall": [0.1, 0.15, 0.12]}),
        f"peer {EVIL}": Samples({"mb_s": [500.0, 550.0]}, errors=[f"ran out of {EVIL}"]),
    }
    return Part("checkpoint", "Checkpoints", metrics=about, candidates=found, against=f"peer {EVIL}", notes=[EVIL])


def one() -> Run:
    alone = Part(
        "sidecar", metrics={"open": Metric("Open, µs", "µs", goal=60)}, candidates={"ours": Samples({"open": [70.0]})}
    )
    cut = Part("loader", status="interrupted", why="interrupted by the user")
    machine = {"cpu": "abacus", "cpus": 2, "file_system": "ext4", "load_before": 0.1, "packages": {"torch": "2"}}
    return Run(["headrace", "bench", "all"], "2026-11-21T10:00:00+00:00", machine, [swept(), beside(), alone, cut])


def test_every_figure_and_every_trouble_is_on_the_page() -> None:
    text = page([("all.json", one())])
    assert "<li><b>loader</b> interrupted: interrupted by the user</li>" in text
    assert "in part: peer &lt;script&gt;" in text
    assert "<td>1,100 (1,000–1,300)</td>" in text
    assert ">55%</span>" in text, "1100 of a limit of 2000"
    assert '<td class="bad">≤ 60 not met</td>' in text
    assert text.count('class="curve') == 2 * (3 + 2 + 3), "throughput, CPU and percentiles, 2 clients each"


def test_nothing_comes_from_elsewhere_and_nothing_from_outside_is_markup() -> None:
    text = page([(EVIL, one())], EVIL)
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "&lt;script&gt;" in text


def test_bars_are_as_long_as_their_medians() -> None:
    drawn = bars("x", {"a": [1.0, 2.0, 9.0], "b": [4.0], "c": []}, unit="s", colours={"a": 0, "b": 1, "c": 2})
    widths = [float(width) for width in re.findall(r'class="bar c\d" x="\d+" y="\d+" width="([\d.]+)"', drawn)]
    assert widths[1] / widths[0] == pytest.approx(2, abs=0.01)
    assert drawn.count('class="sample"') == 4
    assert ">–</text>" in drawn
    assert bars("x", {"a": []}, unit="s", colours={"a": 0}) == ""


@pytest.mark.parametrize("log", [False, True])
def test_curves_stay_inside_and_rise_with_their_values(log: bool) -> None:
    points = [Point(1, [1.0]), Point(2, [10.0, 30.0]), Point(64, [900.0])]
    drawn = curves("x", {"a": points}, x_title="at once", unit="s", colours={"a": 0}, log_y=log)
    match = re.search(r'class="curve c0" points="([^"]*)"', drawn)
    assert match is not None
    places = [tuple(map(float, pair.split(","))) for pair in match[1].split()]
    assert places == sorted(places)
    heights = [y for _, y in places]
    assert heights == sorted(heights, reverse=True)
    assert all(0 < x < 420 and 0 < y < 250 for x, y in places)
    assert curves("x", {}, x_title="", unit="", colours={}) == ""


def test_the_command_writes_the_page_and_the_tables(tmp_path: Path) -> None:
    write(one(), tmp_path / "a.json")
    command = [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "bench",
        "report",
        str(tmp_path / "a.json"),
        "-o",
        str(tmp_path / "r.html"),
    ]
    done = subprocess.run([*command, "--markdown", "--part", "checkpoint"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "`headrace bench all`, 3 rounds, 2 cores of abacus, ext4, load 0.1, 2026-11-21." in done.stdout
    assert "| headrace | 1,100 (1,000–1,300) | 0.12 (0.1–0.15) |" in done.stdout
    assert "### Store" not in done.stdout
    assert "</html>" in (tmp_path / "r.html").read_text()


def test_a_sweep_becomes_a_table_for_each_operation_and_the_command_says_not_where_it_wrote() -> None:
    run = one()
    run.command += ["-o", "/somewhere/it.json", "--rounds", "3"]
    text = markdown([("it.json", run)], ["store"])
    assert "`headrace bench all --rounds 3`" in text
    assert "**get, MB/s**\n\n| | 4.0 KiB ×1 | 4.0 KiB ×4 | 4.0 KiB ×16 | 1.0 MiB ×1 |" in text
    assert "**list, keys/s**\n\n| | ×1 | ×4 | ×16 |" in text


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    write(one(), folder / "all.json")
    assert report([str(folder / "all.json"), "-o", str(folder / "report.html")]) == 0
    return (folder / "report.html").as_uri()


@needs_browser
def test_a_real_browser_shows_it_at_both_widths_in_both_colour_schemes(tmp_path: Path, shown: str) -> None:
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                browser.look(shown, width, 900, scheme)
                browser.wait_until("document.readyState === 'complete' && document.querySelectorAll('svg').length > 6")
                assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
                assert browser.evaluate("document.querySelector('#troubles').innerText").count("\n") == 1
                assert _cut_off(browser) == [], "texts are cut off by their charts"
                shot = tmp_path / f"report-{width}-{scheme}.png"
                picture = browser.screenshot(shot)
                for name, colour in COLOURS[scheme].items():
                    assert _pixels(picture, colour) > 200, f"nothing is drawn in {name} ({width}, {scheme})"
                if SHOTS:
                    (Path(SHOTS) / shot.name).write_bytes(shot.read_bytes())
        assert browser.errors == []


def _cut_off(browser: Browser) -> list[str]:
    """Texts of charts that do not lie within their drawings."""
    return list(
        browser.evaluate(
            """[...document.querySelectorAll('svg')].flatMap(svg => {
              const box = svg.getBoundingClientRect();
              return [...svg.querySelectorAll('text')].filter(text => {
                const at = text.getBoundingClientRect();
                const beside = at.left >= box.left - 1 && at.right <= box.right + 1;
                return !(beside && at.top >= box.top - 1 && at.bottom <= box.bottom + 1);
              }).map(text => text.textContent);
            })"""
        )
    )


def _pixels(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int(np.all(np.abs(picture.astype(int) - np.array(colour)) <= 2, axis=-1).sum())
