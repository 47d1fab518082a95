"""Clips made for a test, and files with contents that a test needs."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.written_media import MakeClip, MakeWav, ReadTar, write_clip, write_wav


@pytest.fixture
def make_clip() -> MakeClip:
    """`make_clip(path, codec=, frames=, options=)` writes a small moving picture, 64x48 at 30 frames a second."""
    return write_clip


@pytest.fixture
def make_wav() -> MakeWav:
    """`make_wav(path, seconds=)` writes a tone, 8 kHz mono."""
    return write_wav


@pytest.fixture
def read_with_webdataset() -> ReadTar:
    """Reads a tar file as the `webdataset` package does, to dicts with `__key__` and the members."""
    return _read_with_webdataset


def _read_with_webdataset(path: Path) -> list[dict[str, Any]]:
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its file to the garbage collector
        samples = list(webdataset.WebDataset(str(path), shardshuffle=False))
        gc.collect()
    return samples
