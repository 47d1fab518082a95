"""Row pages: a second copy of an index part's rows, for looking up samples by number.

Purpose: a batch of a shuffled epoch needs rows from all over the index. To read one row from the Parquet columns, a
reader reads a row group of about a thousand rows, column by column. To read it from the pages, a reader reads one page
of a few dozen rows, without Arrow.

```
page       one msgpack array of rows, compressed with zstd                  `PAGE_ROWS`, or fewer if rows are long
…
directory  for each page: rows, stored bytes, unpacked bytes (u32 each), 16 bytes of the BLAKE3 of the stored bytes
```

This section of the part is between the row groups and the footer. Parquet readers do not read this range. The version
document gives the position of the section and the digest of the directory.

Invariants:

* For its rows, a page holds the same values as the row groups (`headrace verify` compares them). Pages also hold values
  that row groups do not have: pieces, key-frame positions, further videos, the origin of a video's clock, audio start
  times and audio marks (`without_page_fields`).
* The same samples give the same bytes.
* A page is never unpacked beyond the size in the directory, or beyond `MAX_UNPACKED_BYTES`.
* `headrace.dataio.shards.index.row_codec` encodes the rows. It checks each row before the caller gets it.

Failure behaviour: invalid data raise `CorruptionError`, which names the part and the page, and gives the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index.row_codec import encode_row
from headrace.dataio.shards.sample import (
    KeyFrame,
    Member,
    Sample,
)

SHORT_DIGEST = 16
"""The length in bytes of the digest of one page or block. It is short because an object has many of them."""
PAGE_ROWS = 64
PAGE_BYTES = 64 * limits.KIB
"""A page is full when it has `PAGE_ROWS` rows, or at least `PAGE_BYTES` bytes before compression."""
MAX_UNPACKED_BYTES = 128 * limits.MIB
"""The largest unpacked size that a page may declare.

It has room for a full page and the longest row, which has 2,000,000 key frames. The digests of a file's pieces take at
most 16 KiB.
"""
_DIRECTORY_ENTRY = np.dtype([("rows", "<u4"), ("stored", "<u4"), ("unpacked", "<u4"), ("digest", f"V{SHORT_DIGEST}")])
I64 = npt.NDArray[np.int64]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The position of the pages in a part: `pages` bytes from `offset`, followed by the directory.

    The directory has `directory` bytes, and its BLAKE3 is `digest`.
    """

    offset: int
    pages: int
    directory: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.pages + self.directory

    @property
    def is_consistent(self) -> bool:
        """Whether the numbers agree with each other."""
        return min(self.offset, self.pages, self.directory) >= 0 and self.directory % _DIRECTORY_ENTRY.itemsize == 0


_encode = msgspec.msgpack.Encoder().encode
_decode_page = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


# --- writing


def write(samples: Iterable[Sample]) -> tuple[bytes, bytes]:
    """Encode samples as pages. Return the pages and their directory."""
    pages, entries, packer = list[bytes](), list[tuple[int, int, int, bytes]](), zstandard.ZstdCompressor(level=6)
    for rows in _group_into_pages(samples):
        data = _encode_page(rows)
        pages.append(packer.compress(data))
        entries.append((len(rows), len(pages[-1]), len(data), short_digest(pages[-1])))
    return b"".join(pages), np.array(entries, _DIRECTORY_ENTRY).tobytes()


def section_at(offset: int, pages: bytes, directory: bytes) -> Section:
    """Return the document entry for the output of `write`, stored at `offset`."""
    return Section(offset=offset, pages=len(pages), directory=len(directory), digest=digest(directory))


def _group_into_pages(samples: Iterable[Sample]) -> Iterator[list[bytes]]:
    rows, size = list[bytes](), 0
    for sample in samples:
        rows.append(encode_row(sample))
        size += len(rows[-1])
        if len(rows) == PAGE_ROWS or size >= PAGE_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _encode_page(rows: Sequence[bytes]) -> bytes:
    return _encode([msgspec.Raw(one) for one in rows])


# --- reading


class _ThreadDecompressor(threading.local):
    """One decompressor for each thread.

    Threads cannot share a decompressor, and creating one takes as long as the rest of unpacking a page.
    """

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_thread_decompressor = _ThreadDecompressor()


class Directory:
    """The positions of a part's pages, and the rows that they hold.

    The part has `rows` rows. Errors call it `name`.
    """

    def __init__(self, section: Section, data: bytes | memoryview, rows: int, name: str) -> None:
        self._name = name
        if digest(data) != section.digest:
            raise CorruptionError(
                f"{name}: the BLAKE3 digest of the directory of its pages does not match the dataset version"
            )
        self._entries = np.frombuffer(data, _DIRECTORY_ENTRY)
        self._ends: I64 = np.cumsum(self._entries["rows"], dtype=np.int64)
        stored_ends = np.cumsum(self._entries["stored"], dtype=np.int64)
        self._offsets: I64 = np.concatenate([np.zeros(1, np.int64), stored_ends]) + section.offset
        if (self._ends[-1:].sum(), stored_ends[-1:].sum()) != (rows, section.pages) or not self._entries["rows"].all():
            raise CorruptionError(
                f"{name}: the directory of its pages does not match the rows and bytes in the dataset version"
            )

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, rows: I64) -> tuple[I64, I64]:
        """Return for each row the number of its page and its position in that page."""
        pages = np.searchsorted(self._ends, rows, side="right")
        return pages, rows - (self._ends[pages] - self._entries["rows"][pages])

    def range(self, page: int) -> tuple[int, int]:
        """Return the start and the end of a page in the part."""
        return int(self._offsets[page]), int(self._offsets[page + 1])

    def unpack(self, page: int, stored: bytes | memoryview) -> list[msgspec.Raw]:
        """Unpack the rows of a page from its stored bytes. The page is checked; its rows are not."""
        entry = self._entries[page]
        if short_digest(stored) != entry["digest"].tobytes():
            raise self._page_error(page, "its BLAKE3 digest does not match the directory")
        size = int(entry["unpacked"])
        try:
            if size > MAX_UNPACKED_BYTES or zstandard.frame_content_size(stored) != size:
                raise self._page_error(page, "it is of another size than the directory says")
            rows = _decode_page(_thread_decompressor.decompressor.decompress(stored, max_output_size=size))
        except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._page_error(page, f"it cannot be unpacked: {error}") from error
        if len(rows) != entry["rows"]:
            raise self._page_error(page, f"it holds {len(rows)} rows, the directory says {entry['rows']}")
        return rows

    def unpacked(self, page: int) -> int:
        """Return the unpacked size of a page in bytes."""
        return int(self._entries["unpacked"][page])

    def _page_error(self, page: int, why: str) -> CorruptionError:
        return CorruptionError(f"{self._name}: page {page} of its rows: {why}")


def without_page_fields(sample: Sample) -> Sample:
    """Return the sample without the values that tables do not hold.

    These are the pieces of its files, the positions of its key frames, the origin of its clock, its further videos, and
    the start and the marks of its audio.
    """
    members = tuple(Member(m.ext, m.offset, m.length, m.xxh3) for m in sample.members)
    video = sample.video
    if video is not None:
        key_frames = tuple(KeyFrame(k.pts, k.index) for k in video.key_frames)
        video = replace(video, key_frames=key_frames, origin_pts=0)
    audio = sample.audio
    if audio is not None:
        audio = replace(audio, time_base=None, start_pts=0, marks=())
    return replace(sample, members=members, video=video, audio=audio, videos=())


# --- promoted fields, which tables and pages store alike


# --- digests of pages, index parts and documents


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE3 of `data` in hexadecimal."""
    return str(blake3.blake3(data).hexdigest())


def short_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the first `SHORT_DIGEST` bytes of the BLAKE3 of `data`."""
    return blake3.blake3(data).digest(SHORT_DIGEST)
