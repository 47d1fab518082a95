"""WebDataset tars as input: their samples are packed again, with their keys.

Invariant: only headers are read here; members are unpacked by the worker processes, one sample at a time.
Failure behaviour: `CorruptionError` or `UnsupportedError` for an archive that is damaged or holds what a shard may not hold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.remote import Remote, is_url
from headrace.dataio.shards.media.facts import Span

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"BZ": "bzip2", b"\xfd7": "xz"}


@contextlib.contextmanager
def opened(path: str, remote: Remote) -> Iterator[tar.ReadAt]:
    """How to read the archive at a path or a URL."""
    if is_url(path):
        yield remote.reader(path)
        return
    with open(path, "rb", buffering=0) as file:

        def read_at(offset: int, length: int) -> bytes:
            data = os.pread(file.fileno(), length, offset)
            if len(data) != length:
                raise CorruptionError(f"{path}: ends before offset {offset + length}")
            return data

        yield read_at


def samples(path: str, size: int, read_at: tar.ReadAt) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Key and members of every sample of the tar."""
    program = _COMPRESSED.get(read_at(0, min(2, size)))
    if program:
        raise UnsupportedError(f"{path} is compressed by {program}", hint="decompress it first; media already is")
    for key, run in tar.samples(read_at, size, path):
        yield key.removeprefix("./"), tuple(Span(e.ext, path, e.offset, e.length) for e in run)
