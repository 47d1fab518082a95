"""What an attacked process does: each takes one path."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from headrace.dataio import Dataset, index, pack
from headrace.dataio.shards import tar
from headrace.dataio.shards.media.describe import describe
from headrace.dataio.shards.media.messages import Failure
from headrace.dataio.shards.workers.worker import limit_memory


def scan_tar(path: str) -> None:
    """Read every header of a tar."""
    with open(path, "rb") as file:

        def read_at(offset: int, length: int) -> bytes:
            return os.pread(file.fileno(), length, offset)

        for _ in tar.scan(read_at, os.stat(path).st_size, path):
            pass


def index_tar(path: str) -> None:
    """Index one tar in place, strictly."""
    with tempfile.TemporaryDirectory() as folder, index(path, folder, strict=True, workers=1):
        pass


def pack_media(path: str) -> None:
    """Pack one file, strictly."""
    with tempfile.TemporaryDirectory() as folder, pack([path], folder, strict=True, workers=1):
        pass


def read_dataset(path: str) -> None:
    """Open a dataset and read everything that it says it holds."""
    with Dataset(path) as dataset:
        for sample in dataset:
            for member in sample.members:
                dataset.read(sample, member.ext)


def describe_member(path: str) -> None:
    """Describe one file as a probe worker does, in this process."""
    from headrace.dataio.core.errors import CapacityError, CorruptionError, UnsupportedError

    limit_memory()
    answer = describe([(Path(path).suffix[1:], path)])
    if isinstance(answer, Failure):
        kinds = {kind.code: kind for kind in (CapacityError, UnsupportedError)}
        raise kinds.get(answer.code, CorruptionError)(f"{answer.path}: {answer.reason}")


def nothing(path: str) -> None:
    """What the process needs by itself: everything is imported, and one worker was started."""
    with contextlib.suppress(Exception):
        index_tar(path)
