"""The demo's page, as text and in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.demo import Settings
from headrace.bench.demo.page import page
from headrace.bench.demo.runs import DemoResult, compare
from tests.bench.test_demo_comparison import STEPS, run
from tests.support.browser import Browser, needs_browser


def result(*, damaged: bool = False) -> DemoResult:
    reference, killed, resumed = run(1, STEPS), run(1, 4, end=False), run(3, STEPS)
    if damaged:
        resumed[1]["loss"] = (9.0).hex()
    return DemoResult(
        settings=Settings(steps=STEPS, save_every=2, kill_at=2),
        clips="clips",
        samples=3,
        skipped=(),
        reference=tuple(reference),
        killed=tuple(killed),
        resumed=tuple(resumed),
        resume_seconds=1.0,
        sidecar={},
        proof=compare(reference, killed, resumed, STEPS),
    )


def test_both_runs_are_drawn_and_equal_losses_lie_on_equal_points() -> None:
    text = page(result(), [])
    points = {
        name: drawn.split() for name, drawn in re.findall(r'class="(whole|killed|resumed)" points="([^"]*)"', text)
    }
    assert len(points["whole"]) == STEPS
    assert points["killed"] == points["whole"][:4]
    assert points["resumed"] == points["whole"][2:]


def test_a_failed_proof_is_shown_as_one() -> None:
    text = page(result(damaged=True), [])
    assert 'class="verdict bad"' in text
    assert "the loss of step 3" in text


def test_names_from_outside_are_escaped() -> None:
    assert "<script>" not in page(result(), [("quarantined", "<script>alert(1)</script>")])


def test_the_page_needs_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|<script|<link|@import|url\(", page(result(), []))


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_real_browser_draws_all_three_curves(tmp_path: Path, width: int) -> None:
    (tmp_path / "index.html").write_text(page(result(), [("a", "b")]))
    with Browser(tmp_path / "profile") as browser:
        browser.look((tmp_path / "index.html").as_uri(), width, 900, "light")
        browser.wait_until("document.readyState === 'complete'")
        picture = browser.screenshot(tmp_path / "shot.png")
    for colour in ((0x9C, 0xC4, 0xE4), (0x0B, 0x53, 0x94), (0xC2, 0x41, 0x0C)):
        assert np.all(picture == np.array(colour), axis=-1).sum() > 20, f"no pixel of colour {colour}"
