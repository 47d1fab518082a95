"""The page of `headrace ckpt diff -o`: self-contained, escaped, and readable at both widths in both colour schemes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.compare.diff import StepDiff, TensorChange
from headrace.checkpoint.compare.page import MOST_ROWS, _columns, page
from tests.checkpoint.compare.test_diff import run
from tests.support.browser import Browser, needs_browser

EVIL = '"><script>alert(1)</script>'


def change(name: str, before: float = 2.0, diff: float = 1.0) -> TensorChange:
    return TensorChange(name, -1, "float32", (4,), 4, 4, 4, 0, before, before, diff, diff)


def test_a_page_has_a_row_for_each_module_and_a_column_for_each_pair(tmp_path: Path) -> None:
    states = [
        {
            "model": {"a.w": torch.ones(4) * step, "a.b": torch.ones(4) * step, "frozen.w": torch.ones(9)},
            EVIL: torch.ones(2) * step,
        }
        for step in (1, 2, 3)
    ]
    url = run(tmp_path / "store", *states)
    out = tmp_path / "page.html"
    assert ckpt(["diff", url, "--run", "x", "--steps", "1,2,3", "-o", str(out)]) == 0
    text = out.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    assert "<th>1 → 2</th><th>2 → 3</th>" in text
    row = text[text.index("<tr><th>a</th>") :].partition("</tr>")[0]
    assert re.findall(r">([\d.]+)</td>", row) == ["1", "0.5"]
    assert text[text.index("<tr><th>frozen</th>") :].partition("</tr>")[0].count(">=</td>") == 2


def test_the_change_of_a_module_is_that_of_all_its_tensors() -> None:
    found = StepDiff("x@1", "x@2", changed=[change("m/a.w", 3.0, 1.5), change("m/a.b", 4.0, 2.0)])
    (column,) = _columns([found])
    assert column["m/a"].relative == pytest.approx(2.5 / 5.0)
    assert "from 0" in page("url", [StepDiff("x@1", "x@2", changed=[change("m/a.w", 0.0, 1.0)])])


def test_many_modules_are_shortened_until_they_fit() -> None:
    found = StepDiff("x@1", "x@2", changed=[change(f"m/layers.{i}.part.{j}.w") for i in range(100) for j in range(9)])
    (column,) = _columns([found])
    assert len(column) == 100 <= MOST_ROWS
    assert "m/layers.7.part" in column


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_a_browser_shows_the_page_without_sideways_scrolling(tmp_path: Path, width: int, scheme: str) -> None:
    names = [f"model/transformer.layers.{i}.self_attention.out_projection.weight" for i in range(12)]
    diffs = [
        StepDiff(f"x@{n}", f"x@{n + 1}", changed=[change(name, 1.0, 10.0**-n) for name in names]) for n in range(8)
    ]
    path = tmp_path / "page.html"
    path.write_text(page("s3://bucket/checkpoints", diffs))
    with Browser(tmp_path / "profile") as browser:
        browser.look(path.as_uri(), width, 800, scheme)
        browser.wait_until("document.readyState === 'complete'")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelector('.heat tbody th').getBoundingClientRect().width") >= 90
        assert browser.errors == []
