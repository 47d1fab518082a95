"""The blocks of the explanation and reference pages run in this process, as those of the pages for one task do.

A block that does not run here is named by its first line, so that it may move to another page.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace import pack
from headrace.loaders.decode import registry
from headrace.loaders.decode.pyav import PyAVDecoder
from tests.support import pages
from tests.support.page_runs import PageRun, fill_bucket, opened
from tests.support.shared_folder import shared_folder
from tests.support.written_media import write_clip, write_wav

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DOCS = pages.ROOT / "docs"
RUN = sorted(page for folder in ("explanation", "reference") for page in DOCS.glob(f"{folder}/**/*.md"))
RUN = [page for page in RUN if pages.blocks(page)]
ELSEWHERE = {
    "headrace sidecar run [--config FILE]": "a synopsis; tests/dataio/sidecar runs the command",
    "headrace sidecar run --tier-dir /dev/shm": "needs two nodes; tests/checkpoint/tier has two daemons",
    "headrace doctor URL": "tests/docs/test_howto.py runs the page of doctor",
    "from headrace.dataio.testing.s3_server import": "waits for a key; the server is that of the tests",
}
"""Blocks that are not run here, by the beginning of their first line with code → why, and where they are tried."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bucket of the pages, with a dataset "ds" of clips with sound."""
    return shared_folder(tmp_path_factory, "explained", lambda folder: _fill(folder, tmp_path_factory))


def _fill(bucket: Path, factory: pytest.TempPathFactory) -> None:
    shutil.copytree(shared_folder(factory, "pages", fill_bucket), bucket, copy_function=os.link, dirs_exist_ok=True)
    for number in range(16):
        clip = write_clip(bucket / "films" / f"{number:02}.mp4", frames=60 + number)
        write_wav(clip.with_suffix(".wav"), 2.0)
    pack([bucket / "films"], bucket / "ds", workers=1).close()


@pytest.fixture
def run(page: Path, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRun]:
    bucket, folder = tmp_path / "bucket", tmp_path / "here"
    shutil.copytree(filled, bucket, copy_function=os.link)
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    monkeypatch.setattr(registry, "_registered", registry.all_decoders())
    with opened(page, bucket, folder) as prepared, prepared.stack:
        names = prepared.names
        names["checkpointer"].save(1300, names["state"]).result(60)
        names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
        names["state"] = {**names["state"], "scheduler": names["scheduler"]}
        names["tracer"] = SimpleNamespace(start_as_current_span=lambda name, attributes: contextlib.nullcontext())
        names |= {"MyDecoder": PyAVDecoder, "step": 1400}
        (folder / "state.json").write_text(json.dumps(names["loader"].state_dict()))
        (folder / "suspects.txt").write_text("made_00\n")
        prepared.places["--ranks 64"] = "--ranks 2"  # ranks that divide the small batch
        yield prepared


def first_line(block: pages.Block) -> str:
    """The first line that is no comment."""
    return next((line for line in block.text.splitlines() if line.strip() and not line.startswith("#")), "")


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, run: PageRun) -> None:
    for block in pages.blocks(page):
        if block.runs and not any(first_line(block).startswith(line) for line in ELSEWHERE):
            run.run(block)


def test_each_block_that_is_not_run_here_is_on_a_page() -> None:
    lines = {first_line(block) for page in RUN for block in pages.blocks(page)}
    gone = {told for told in ELSEWHERE if not any(line.startswith(told) for line in lines)}
    assert not gone
