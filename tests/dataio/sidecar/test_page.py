"""The status page in a real browser, with a daemon, a loader and saves behind it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.dataio import pack
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.client import SaveMeter
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for
from tests.support import nursery
from tests.support.browser import Browser, needs_browser

RUN = "flow-7b"
SHOTS = os.environ.get("HEADRACE_SCREENSHOTS")
"""A folder that gets pictures of the page: docs/pictures/status-light.png is its page-1280-light.png, and so in dark."""
STEPS = 500 if SHOTS else 30
"""Steps of the job before it is looked at. Pictures for the documentation have two minutes in their charts."""
NOTHING_CUT = "[...document.querySelectorAll('dd')].every((e) => e.scrollWidth <= e.clientWidth)"
COMMANDS = {"checkpoint": [sys.executable, "-m", "headrace.checkpoint.saving.commit_worker"]}


@dataclass
class Job:
    daemon: RunningDaemon
    stop: Path
    process: nursery.Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.daemon.status()['http_port']}/"


@pytest.fixture
def job(daemon: RunningDaemon, media: Path, tmp_path: Path) -> Iterator[Job]:
    """A trainer that has saved at least once, on the daemon's node."""
    daemon.kill()
    daemon.options["commands"] = COMMANDS
    daemon.start()
    clips = sorted(media.rglob("*.mp4"))[:4]
    pack([os.fspath(clip) for clip in clips], os.fspath(tmp_path / "ds")).close()
    stop = tmp_path / "stop"
    arguments = [str(path) for path in (tmp_path / "ds", tmp_path / "ck", daemon.socket, stop)]
    process = nursery.start_with_log(tmp_path / "trainer.log", "tests.support.status_page_trainer", *arguments)

    def saved() -> bool:
        assert process.poll() is None, (tmp_path / "trainer.log").read_text()
        return any(line["last_step"] and line["steps"] > STEPS for line in daemon.status()["training"])

    wait_for(saved, 180 if SHOTS else 120)
    yield Job(daemon, stop, process)
    stop.touch()
    assert process.wait(60) == 0, (tmp_path / "trainer.log").read_text()


def colours(picture: np.ndarray) -> int:
    """How many different colours there are. Counting takes 0.1 s, sorting the pixels 5 s."""
    red, green, blue = np.moveaxis(picture.astype(np.int32), -1, 0)
    return int(np.count_nonzero(np.bincount((red << 16 | green << 8 | blue).ravel())))


@needs_browser
def test_the_page_shows_a_real_job_at_both_widths_in_both_schemes(job: Job, tmp_path: Path) -> None:
    folder = Path(SHOTS or tmp_path)
    with Browser(tmp_path / "profile") as browser:
        for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")):
            browser.look(job.url, width, 900, scheme)
            browser.wait_until(
                "document.body?.className === 'live' && document.querySelectorAll('.chart path').length >= 6"
            )
            text = browser.evaluate("document.body.innerText")
            assert RUN in text
            for wanted in ("Goodput", "Data wait", "Save stall", "Cache hits", "ago", "committed", "1 process"):
                assert wanted in text
            assert text.count("Queue") == 2  # the job's, and all of the node
            assert not any(bad in text for bad in ("NaN", "undefined", "null", "Infinity"))
            assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"too wide at {width}"
            assert browser.evaluate(NOTHING_CUT), f"a figure is cut off at {width}"
            picture = browser.screenshot(folder / f"page-{width}-{scheme}.png")
            assert (float(np.median(picture)) < 90) is (scheme == "dark")
            assert colours(picture) > 50
        assert browser.errors == []


@needs_browser
def test_the_page_says_that_the_daemon_is_gone_and_goes_on_when_it_is_back(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    meter = SaveMeter("before")
    with Browser(tmp_path / "profile") as browser:
        port = daemon.status()["http_port"]
        with daemon.connect() as trainer:
            trainer.reporting = meter.report
            browser.look(f"http://127.0.0.1:{port}/", 1280, 900, "light")
            browser.wait_until("document.querySelectorAll('h3').length === 1")
            assert browser.errors == []
            daemon.kill()
        browser.wait_until("document.getElementById('live').innerText.includes('does not answer')")
        assert browser.evaluate("document.querySelector('h3').textContent") == "before"  # what was known stays
        daemon.options["http_port"] = port
        daemon.start()
        browser.wait_until("document.body?.className === 'live' && document.querySelectorAll('h3').length === 0")
        assert browser.errors
        assert all("ERR_CONNECTION_REFUSED" in error for error in browser.errors)


@needs_browser
def test_an_idle_daemon_has_a_page_too(daemon: RunningDaemon, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.look(f"http://127.0.0.1:{daemon.status()['http_port']}/", 400, 800, "light")
        browser.wait_until("document.body?.className === 'live'")
        text = browser.evaluate("document.body.innerText")
        assert "No trainer has reported" in text
        assert "No checkpoint has been staged yet" in text
        assert "NaN" not in text
        if SHOTS:
            browser.screenshot(Path(SHOTS) / "page-idle.png")
        assert browser.errors == []


@needs_browser
def test_names_from_outside_stay_text(daemon: RunningDaemon, tmp_path: Path) -> None:
    nasty = "<img src=x onerror=document.title='owned'>"
    meter = SaveMeter(nasty)
    with daemon.connect() as trainer, daemon.connect() as bad, Browser(tmp_path / "profile") as browser:
        trainer.reporting = meter.report
        bad._sock.sendall(wire.frame(m.encode(m.Hello(m.VERSION, 1))))  # a second one
        wait_for(lambda: daemon.status()["training"])
        browser.look(f"http://127.0.0.1:{daemon.status()['http_port']}/", 1280, 800, "dark")
        browser.wait_until("document.querySelectorAll('h3').length === 1")
        assert browser.evaluate("document.querySelector('h3').textContent") == nasty
        assert browser.evaluate("document.images.length") == 0
        assert "a second hello" in browser.evaluate("document.getElementById('errors').innerText")
        assert browser.errors == []
