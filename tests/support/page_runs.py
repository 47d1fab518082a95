"""Runs the blocks of a page in this process, with small data in place of the buckets and names that the page takes for granted.

A page's blocks share their names, as the cells of a notebook do. Of a block of commands, the lines that begin with
`headrace` are run; other programs (kubectl, mount, systemctl) are not.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from headrace import RNG, Checkpointer, Clip, Dataset, VideoLoader, pack
from headrace.bench.core.data import make_clip
from headrace.dataio.cli import main
from tests.support import pages
from tests.support.pictures import picture
from tests.support.written_media import write_wav

INTERRUPTED = 130
FINDINGS = ("diff", "doctor", "quarantine", "samples", "verify")
"""Commands whose exit code may also be 1, since it says what they found."""
_ENDLESS = re.compile(r"--watch\b|--(?:every|follow) \d+[smh]")
_SECONDS = 2.0


@dataclass
class PageRun:
    """A page, and what stands for its names.

    Args:
        name: The page's name, without its folder and suffix.
        folder: The current folder, which is empty at first.
        places: Texts of the page → what stands for them. Longer texts are replaced first.
        names: What the page's Python may use. Its blocks add to it.
        stack: Closed at the end.
    """

    name: str
    folder: Path
    places: dict[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def bucket(self) -> Path:
        """The folder that stands for `s3://bucket`."""
        return Path(self.places["s3://bucket"])

    @property
    def repository(self) -> Path:
        """The folder that stands for `s3://bucket/checkpoints`."""
        return self.folder / "checkpoints"

    def run(self, block: pages.Block) -> None:
        """Run a block. Raises what its Python raises, and `AssertionError` for a command that fails."""
        text = self._placed(block.text)
        if block.language in pages.PYTHON:
            exec(compile(text, f"{self.name}.md", "exec"), self.names)
            return
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("headrace "):
                self._command(shlex.split(line, comments=True)[1:], line)

    def _placed(self, text: str) -> str:
        for told in sorted(self.places, key=len, reverse=True):
            text = text.replace(told, self.places[told])
        return text

    def _command(self, words: list[str], line: str) -> None:
        words = words[: words.index(">")] if ">" in words else words
        if _ENDLESS.search(" ".join(words)):
            allowed, code = {0, INTERRUPTED}, self._until_interrupted(words)
        else:
            allowed, code = {0, int(words[0] in FINDINGS)}, main(words)
        assert code in allowed, f"{self.name}: exit code {code}: {line}"

    def _until_interrupted(self, words: list[str]) -> int:
        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        try:
            return main(words)
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def fill_bucket(folder: Path) -> Path:
    """Write the datasets "clips", "talks", "latents", "recordings", and "mixed" with images."""
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
    (sounds := folder / "sounds").mkdir()
    for number in range(8):
        write_wav(sounds / f"recording_{number}.wav", 1.0 + number / 4)
    pack([sounds], folder / "recordings", workers=1).close()
    return folder


@contextlib.contextmanager
def opened(page: Path, bucket: Path, folder: Path, *, first_saves: bool = False) -> Iterator[PageRun]:
    """A page with what most pages take for granted.

    These are a model, an optimizer, a loader, and a repository with the run "pretraining" and, unless the page makes its
    `first_saves`, the run "exp42".
    """
    (folder / "out").mkdir()
    (folder / "out" / "0.png").write_bytes(picture("png", 64, 48))
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(16, 16), "lora_a": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(VideoLoader(str(bucket / "clips"), batch_size=2, clip=Clip(frames=2)))
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNG()}
        for run, steps in (("pretraining", (1000,)), ("exp42", () if first_saves else (1000, 1100, 1200))):
            checkpointer = stack.enter_context(Checkpointer(folder / "checkpoints", run=run, sidecar=None))
            for step in steps:
                checkpointer.save(step, state, metadata={"loss": 1 / step}).result(60)
        names: dict[str, Any] = {**state, "torch": torch, "state": state, "checkpointer": checkpointer}
        names |= {"url": str(bucket / "mixed"), "dataset": stack.enter_context(Dataset(bucket / "mixed"))}
        names |= {"train": lambda step: None, "step": 1300, "first": 1201, "last": 1203}
        places = {
            "s3://bucket": str(bucket),
            "s3://bucket/checkpoints": str(folder / "checkpoints"),
            "s3://bucket/elsewhere": str(folder / "elsewhere"),
            " URL": f" {folder / 'checkpoints'}",
            " DATASET": f" {bucket / 'clips'}",
        }
        yield PageRun(page.stem, folder, places, names, stack)
        if "guard" in names:
            names["guard"].close()  # the handlers of signals that were there before


def run_blocks(run: PageRun, blocks: list[pages.Block], changes: Mapping[str, str] | None = None) -> None:
    """Run the blocks of a page that are not marked. `changes`: settings of the page that are too large for a test."""
    run.places |= changes or {}
    for block in blocks:
        if block.runs:
            run.run(block)


Prepare = Callable[[PageRun], None]
"""Makes what one page takes for granted, besides what `opened` makes."""
