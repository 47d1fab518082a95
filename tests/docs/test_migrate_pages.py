"""The blocks of docs/howto/migrate run, from the first to the last of a page, on data sets that the real libraries wrote."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import Dataset
from headrace.dataio.cli import main
from tests.support import pages
from tests.support.migrations import RECORDED, run_script

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HOWTO = pages.ROOT / "docs" / "howto" / "migrate"
SMALLER = {
    "checkpoints": [("out/step_900.pt", "refused_900.pt")],
    "energon": [('train", 16, ', 'train", 2, trust_mounts=True, '), ("}), 16, ", "}), 2, trust_mounts=True, ")],
    "litdata": [('dataset", 16', 'dataset", 2')],
    "mds": [("mds/train", "mds"), ('dataset", 16', 'dataset", 2')],
    "webdataset": [
        ("pipe:aws s3 cp ", ""),
        ('.tar -"', '.tar"'),
        (".tar -'", ".tar'"),
        ("{shard.key} -", "{shard.key}"),
        ("{0000..0999}", "{000..003}"),
        ("0000.tar", "000.tar"),
        ("with_epoch(1000)", "with_epoch(2)"),
        ("num_workers=8", "num_workers=0"),
        ('set", 16', 'set", 2'),
    ],
}
"""What differs here: names of files and recorded data sets, how webdataset reads them, batches, and worker processes."""
RUN = sorted(page for page in HOWTO.glob("*.md") if pages.blocks(page))


@pytest.fixture
def bucket(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in place of the bucket, with the data set of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    monkeypatch.setenv("HEADRACE_QUARANTINE", str(tmp_path / "quarantine"))
    (folder := tmp_path / "bucket").mkdir()
    if page.stem == "webdataset":
        (folder / "set").mkdir()
        for tar in (RECORDED / "energon").glob("*.tar"):
            shutil.copy(tar, folder / "set" / tar.name.removeprefix("shard_"))
    elif page.stem != "checkpoints":
        shutil.copytree(RECORDED / page.stem, folder / page.stem)
    return folder


@pytest.fixture
def scope(tmp_path: Path) -> dict[str, Any]:
    """What the pages take for granted: a model, its optimizer, batches, and the checkpoints `step_1000.pt` and `step_900.pt`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(*batch: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    train()
    (tmp_path / "out").mkdir()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1000}
    torch.save(saved, tmp_path / "out" / "step_1000.pt")
    refused = {"model": model.state_dict(), "args": argparse.Namespace(lr=0.1), "loss": np.float64(0.5)}
    torch.save(refused, tmp_path / "refused_900.pt")  # in `out`, it would stop the import of the page
    return {"model": model, "optimizer": optimizer, "train": train, "batches": range(100), "torch": torch}


def remove(place: str) -> None:
    """`aws s3 rm`, of a folder or a file."""
    path = Path(place)
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_commands(text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        match shlex.split(line, comments=True):
            case ["headrace", *words]:
                assert main(words) == 0, line
            case ["python", script, *words]:
                assert run_script(Path(script).name, *words) == 0, line
            case ["aws", "s3", "rm", *_, place]:
                remove(place)
            case words:
                assert not words, line


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(
    page: Path,
    bucket: Path,
    scope: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = ""
    for block in pages.blocks(page):
        text = block.text.replace("s3://bucket", str(bucket))
        for told, small in SMALLER.get(page.stem, ()):
            text = text.replace(told, small)
        if "aws s3 rm" in text:
            with Dataset(bucket / "set", trust_mounts=True) as dataset:
                dataset.tag("first")
        if block.language == "text" and not block.mark:
            assert pages.missing(block.text, printed) == []
        elif block.runs and block.language in pages.PYTHON:
            exec(compile(text, page.name, "exec"), scope)
        elif block.runs:
            run_commands(text)
        printed = capsys.readouterr().out
    if page.stem == "checkpoints":
        assert torch.load("refused_900.pt", weights_only=True)["args"] == {"lr": 0.1}, "the page converts it"
    if page.stem == "webdataset":
        left = {path.name for path in (bucket / "set").iterdir()} - {".headrace-tmp"}  # a bucket has none
        assert left == {f"{number:03}.tar" for number in range(4)}, "the page removes all that Headrace wrote"
    for name in ("loader", "checkpointer"):
        if (made := scope.get(name)) is not None and type(made).__module__.startswith("headrace"):
            made.close()
