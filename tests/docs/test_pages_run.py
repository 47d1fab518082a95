"""The first page and the tutorials do what they show, run by a shell from their first block to their last."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support import pages

DOCS = pages.ROOT / "docs"
ONE_TERMINAL = [DOCS / "tutorials" / f"{name}.md" for name in ("bucket-in-place", "sidecar")]
"""Both start an S3 server, and set its variables in the shell. The second must not find what the first left there."""
ALONE = [DOCS / "start.md", *sorted(page for page in DOCS.glob("tutorials/*.md") if page.stem != "index")]
RUN = [ONE_TERMINAL, *([page] for page in ALONE if page not in ONE_TERMINAL)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("several", RUN, ids=lambda several: "-then-".join(page.stem for page in several))
def test_the_pages_of_a_terminal_do_what_they_show(several: list[Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="hr") as folder:  # a short path, since sockets lie in it
        printed = pages.run_in_one_shell(several, Path(folder))
    for page, blocks in zip(several, printed, strict=True):
        assert pages.unexpected(page, blocks) == {}, page.name


def test_every_mark_stands_directly_before_a_block() -> None:
    for page in DOCS.glob("**/*.md"):
        marked = [block for block in pages.blocks(page) if block.mark]
        assert page.read_text().count("<!-- not run:") == len(marked), page


def test_a_line_is_found_though_its_numbers_differ_and_a_missing_one_is_named() -> None:
    printed = "step 1: 0.25\nwritten 3.1 MiB in 2.0 s\ndigest 39051f08973cf564\n"
    assert pages.missing("step 9: 1.5\n…\nwritten 17 KiB in 1 s\ndigest aaaa000\n", printed) == []
    assert pages.missing("written 1 B in 1 s\nstep 1: 2\n", printed) == ["step 1: 2"]
    assert pages.missing("step … 2\nerased 3 B\n", printed) == ["erased 3 B"]
