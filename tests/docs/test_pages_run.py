"""The first page and the tutorials do what they show, run by a shell from their first block to their last."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support import pages

DOCS = pages.ROOT / "docs"
RUN = [DOCS / "start.md", *sorted(page for page in DOCS.glob("tutorials/*.md") if page.stem != "index")]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_a_page_does_what_it_shows(page: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hr") as folder:  # a short path, since sockets lie in it
        printed = pages.run(page, Path(folder))
    assert pages.unexpected(page, printed) == {}


def test_every_mark_stands_directly_before_a_block() -> None:
    for page in DOCS.glob("**/*.md"):
        marked = [block for block in pages.blocks(page) if block.mark]
        assert page.read_text().count("<!-- not run:") == len(marked), page


def test_a_line_is_found_though_its_numbers_differ_and_a_missing_one_is_named() -> None:
    printed = "step 1: 0.25\nwritten 3.1 MiB in 2.0 s\ndigest 39051f08973cf564\n"
    assert pages.missing("step 9: 1.5\n…\nwritten 17 KiB in 1 s\ndigest aaaa000\n", printed) == []
    assert pages.missing("written 1 B in 1 s\nstep 1: 2\n", printed) == ["step 1: 2"]
    assert pages.missing("step … 2\nerased 3 B\n", printed) == ["erased 3 B"]
