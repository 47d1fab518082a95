"""WebDataset tars as input: their samples are packed again, with their keys.

Invariant: only headers are read here; members are unpacked by the worker processes, one sample at a time.
Failure behaviour: `CorruptionError` or `UnsupportedError` for an archive that is damaged or holds what a shard may not hold.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from dataio.core.errors import CorruptionError, UnsupportedError
from dataio.shards import tar
from dataio.shards.media.facts import Span

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"BZ": "bzip2", b"\xfd7": "xz"}


def samples(path: Path) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Key and members of every sample of the tar: a run of neighbouring members of one key."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        program = _COMPRESSED.get(os.pread(file.fileno(), 2, 0))
        if program:
            raise UnsupportedError(f"{path} is compressed by {program}", hint="decompress it first; media already is")

        def read_at(offset: int, length: int) -> bytes:
            data = os.pread(file.fileno(), length, offset)
            if len(data) != length:
                raise CorruptionError(f"{path}: ends before offset {offset + length}, its size was {size}")
            return data

        for key, run in itertools.groupby(tar.scan(read_at, size, str(path)), key=lambda entry: entry.key):
            spans = tuple(Span(e.ext, str(path), e.offset, e.length) for e in run)
            yield key.removeprefix("./"), spans
