"""WebDataset tars as input: `pack` packs their samples again under the same keys.

Invariant: this module reads only headers. The worker processes read the members, one sample at a time.
Failure behaviour: a damaged archive raises `CorruptionError`. An archive that holds something that a shard must not
hold raises `UnsupportedError`.
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
    """Open the archive at a path or a URL, and yield a function that reads a range of it."""
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
    """Yield the key and the members of each sample in the tar."""
    program = _COMPRESSED.get(read_at(0, min(2, size)))
    if program:
        raise UnsupportedError(f"{path} is compressed by {program}", hint="decompress it first; media already is")
    for key, run in tar.samples(read_at, size, path):
        yield key.removeprefix("./"), tuple(Span(e.ext, path, e.offset, e.length) for e in run)
