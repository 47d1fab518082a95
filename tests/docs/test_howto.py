"""The blocks of the pages for one task run in this process, with a folder in place of the bucket that they name.

A page's blocks share their names, as the cells of a notebook do. A block that needs more than a laptop is marked on the page,
and counted here.
"""

from __future__ import annotations

import collections
import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import RNG, Checkpointer, Clip, Dataset, VideoLoader, pack
from headrace.bench.core.data import make_clip
from headrace.dataio.cli import main
from tests.support import pages
from tests.support.pictures import picture

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HOWTO = pages.ROOT / "docs" / "howto"
PARTLY = {
    "compare-copy": "its commands, in tests/checkpoint/compare and tests/checkpoint/copies",
    "export-import": "tests/checkpoint/exchange/test_page.py",
    "fields": "tests/loaders/fields",
    "fsspec": "tests/checkpoint/test_filesystem.py",
    "frameworks": "tests/test_frameworks_page.py",
    "indexing": "tests/dataio/shards/ingest",
    "looking-after": "tests/dataio/shards/verify",
    "packing": "tests/dataio/shards/ingest",
    "publishing": "tests/checkpoint/publishing",
    "runbook": "its alerts and commands, in tests/deploy/test_runbook.py",
    "trackers": "tests/checkpoint/trackers/test_trackers.py",
    "trainers": "tests/checkpoint/frameworks",
    "versions": "tests/dataio/shards/versions",
}
"""Guides that name many commands without a situation in which all of them run → where their subject is tested."""
RUN = sorted(page for page in HOWTO.glob("*.md") if page.stem not in PARTLY and pages.blocks(page))
FIRST_SAVES = {"dcp", "metadata"}
"""Pages that save the first steps of the run "exp42"."""
SMALLER = {"buckets": [("64 * 16", "8 * 16"), ("multiple=8", "multiple=1"), ("32 * 512", "7 * 512")]}
"""Settings of a page that are too large for datasets of eight clips."""
NOT_RUN = {
    "installs packages": 1,
    "needs VAST": 2,
    "needs a bucket": 1,
    "needs a daemon": 1,
    "needs a run with event logs": 1,
    "needs litdata": 2,
    "needs megatron-energon": 1,
    "needs mosaicml-streaming": 2,
    "needs the disks of a node": 1,
    "needs the state of a trainer": 1,
}
"""Blocks that are shown and not run, by reason, on all pages of the site."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets "clips", "talks" and "latents", and with images in "mixed"."""
    folder = tmp_path_factory.mktemp("bucket")
    media = folder / "media"
    for number in range(8):
        clip = make_clip(media, number, seconds=2)
        clip.with_suffix(".json").write_text(f'{{"caption": "a dog, number {number}", "score": {number / 8}}}')
        np.save(media / f"{clip.stem}.latent.npy", np.full((4, 8, 8), number, np.float32))
        np.save(media / f"{clip.stem}.npy", np.full(4, number, np.float32))
    for name in ("clips", "talks", "latents"):
        pack([media], folder / name, workers=1).close()
    for number in range(8):
        (media / f"picture_{number}.png").write_bytes(picture("png", 64, 48))
    pack([media], folder / "mixed", workers=1).close()
    return folder


@pytest.fixture
def scope(page: Path, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the pages take for granted: a model, an optimizer, a loader, a repository with the runs "pretraining" and "exp42"."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0.png").write_bytes(picture("png", 64, 48))
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    monkeypatch.setenv("HEADRACE_QUARANTINE", str(bucket / "quarantine"))
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(16, 16), "lora_a": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(VideoLoader(str(bucket / "clips"), batch_size=2, clip=Clip(frames=2)))
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNG()}
        for run, steps in (("pretraining", (1000,)), ("exp42", () if page.stem in FIRST_SAVES else (1000, 1100, 1200))):
            checkpointer = stack.enter_context(Checkpointer(tmp_path / "checkpoints", run=run, sidecar=None))
            for step in steps:
                checkpointer.save(step, state, metadata={"loss": 1 / step}).result(60)
        others = {
            "url": str(bucket / "mixed"),
            "dataset": stack.enter_context(Dataset(bucket / "mixed")),
            "torch": torch,
        }
        others["train"] = lambda step: None
        others |= {"state": state, "checkpointer": checkpointer, "step": 1300, "first": 1201, "last": 1203}
        names: dict[str, Any] = {**state, **others}
        yield names
        if "guard" in names:
            names["guard"].close()  # the handlers of signals that were there before


def run(block: pages.Block, bucket: Path, scope: dict[str, Any], name: str) -> None:
    text = block.text.replace("s3://bucket/checkpoints", str(Path.cwd() / "checkpoints"))
    text = text.replace("s3://bucket/elsewhere", str(Path.cwd() / "elsewhere")).replace("s3://bucket", str(bucket))
    for told, small in SMALLER.get(name, ()):
        text = text.replace(told, small)
    if block.language in pages.PYTHON:
        exec(compile(text, name, "exec"), scope)
        return
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "headrace":
            places = {"URL": str(Path.cwd() / "checkpoints"), "DATASET": str(bucket / "clips")}
            assert main([places.get(word, word) for word in words[1:]]) == 0, line


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, bucket: Path, scope: dict[str, Any]) -> None:
    for block in pages.blocks(page):
        if block.runs:
            run(block, bucket, scope, page.stem)


def test_the_blocks_that_are_not_run_are_known() -> None:
    everywhere = sorted((pages.ROOT / "docs").glob("**/*.md"))
    marks = collections.Counter(block.mark for page in everywhere for block in pages.blocks(page) if block.mark)
    assert marks == NOT_RUN


def test_the_other_guides_exist_and_name_their_tests() -> None:
    for stem, where in PARTLY.items():
        assert (HOWTO / f"{stem}.md").exists()
        for path in re.findall(r"tests/[\w/.]+", where):
            assert (pages.ROOT / path).exists(), path
