"""Excerpts of Ogg (Opus and Vorbis), page by page.

Purpose: each page lists the number of samples up to its end. So an excerpt can consist of the file's headers and some
of its pages, unchanged.

Invariants:
- An excerpt contains whole, unchanged pages: from the page of `low` minus `_BEFORE` to the page of `high` plus
  `_BEFORE`. They keep their time stamps, which count from the file's beginning.
- No page is missing between two packets that the index marks. The pages' sample counts match the time stamps that libav
  found during indexing.
- Only files with one stream are cut, and an excerpt never begins with the first audio page.
- FLAC in Ogg is not cut, since libav counts the packets that it receives.

Failure behaviour: None for every other file, and if no page begins at the end of the page before it; libav then reads
the file itself. `check` raises `CorruptionError` for damaged or missing pages.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.sample import AudioInfo, AudioMark
from headrace.loaders.audio.excerpts.base import Excerpt, marks_around
from headrace.loaders.fetch.partial_file import Media

EXTENSIONS = frozenset(["ogg", "oga", "opus"])
_CODECS = frozenset(["opus", "vorbis"])
_BEFORE = Fraction(1, 10)
"""Seconds by which the pages' counts may exceed time stamps: pages also count the samples that decoders drop at the
beginning."""
_PAGE = struct.Struct("<4sBBqIIIB")
_MOST_HEADERS = 4 * limits.MIB
_MOST_PAGES = 1 << 16
_FIRST_PAGE = 512
_PAGES = Fraction(5)
"""Seconds. The duration of several pages."""
_AT_ONCE = 64 * limits.KIB
_LONGEST_PACKET = 1 << 13
"""Maximum number of samples in a packet. A packet may begin on the page before."""


class _Page(msgspec.Struct, frozen=True):
    at: int
    end: int
    samples: int
    """Samples up to the end of the page's last complete packet; -1 if no packet ends in it."""
    serial: int
    number: int


def excerpt(data: Media, info: AudioInfo, low: Fraction, high: Fraction) -> Excerpt | None:
    """The excerpt from `low` to `high`, in seconds on the file's own time line."""
    rate = 48_000 if info.codec == "opus" else info.sample_rate  # the sample rate in which pages count
    head = _last_header(data) if info.codec in _CODECS else None
    if head is None or info.time_base != Fraction(1, rate):
        return None
    lead = _lead(data, info)
    low, high = low - _BEFORE, high + _BEFORE
    marks = marks_around(info, low, high)
    if not marks or marks[0].pts > low * rate:
        return None
    pages = list(_pages_until(data, marks[0].at, head.serial, int(high * rate) + lead, marks[-1].at))
    if not pages or not _marks_match(pages, marks, lead):
        return None
    first_sample = int(low * rate)
    page_ends = [page.end for page in pages if 0 <= page.samples <= first_sample]
    start = page_ends[-1] if page_ends else pages[0].at
    chosen = [page for page in pages if page.at >= start]
    if start == head.end or not chosen or not all(_is_intact(data, page) for page in chosen):
        return None
    return Excerpt([data[: head.end], data[start : pages[-1].end]], "ogg")


def _marks_match(pages: Sequence[_Page], marks: Sequence[AudioMark], lead: int) -> bool:
    """Whether no page is missing, and marked packets begin pages at the correct time.

    That time is `lead` samples less than the sample count of the page before.
    """
    if any(other.number != (one.number + 1) % (1 << 32) for one, other in pairwise(pages)):
        return False
    samples_before, counted = dict[int, int](), -1
    for page in pages:
        samples_before[page.at], counted = counted, page.samples if page.samples >= 0 else counted
    for mark in marks:
        if mark.at not in samples_before:
            return False
        if samples_before[mark.at] >= 0 and abs(samples_before[mark.at] - lead - mark.pts) > _LONGEST_PACKET:
            return False
    return True


def _lead(data: Media, info: AudioInfo) -> int:
    """Number of samples that pages count before time zero."""
    page = bytes(data[:_FIRST_PAGE])
    at = page.find(b"OpusHead") if info.codec == "opus" else -1
    return int.from_bytes(page[at + 10 : at + 12], "little") if at >= 0 else 0


def check(data: Media, info: AudioInfo, low: Fraction, high: Fraction) -> None:
    """Raise `CorruptionError` if pages between these times are damaged or missing.

    libav skips such pages without an error.
    """
    first_page = _read_page(data, 0)
    lead, rate = _lead(data, info), 48_000 if info.codec == "opus" else info.sample_rate
    at, counted = 0, -1
    for mark in info.marks if info.time_base == Fraction(1, rate) else ():
        if mark.pts >= (low - _PAGES) * rate:  # after a skipped page, time stamps may be those of that page
            break
        at, counted = mark.at, mark.pts + lead
    number, fault = None, -1
    while first_page is not None and at < len(data) and counted <= int(high * rate) + lead:
        page = _read_page(data, at)
        if page is None:
            fault, at = at, _next_page(data, at + 1)
            continue
        if page.serial != first_page.serial:
            return  # several streams; the others may count differently
        if number not in (None, page.number) or not _is_intact(data, page):
            fault = at
        elif page.samples >= 0:
            counted = page.samples
            if fault >= 0 and counted >= int(low * rate) + lead:
                break
            fault = -1
        # page numbers may jump after the headers if the audio was cut
        at, number = page.end, (page.number + 1) % (1 << 32) if page.samples else None
    if fault >= 0:
        raise CorruptionError(f"the page of Ogg at byte {fault} is damaged, or one before it is missing")


def _next_page(data: Media, at: int) -> int:
    """The offset of the next possible page, or the end of the data if there is none."""
    while at < len(data):
        view = bytes(data[at : at + _AT_ONCE])
        position = view.find(b"OggS")
        if position >= 0:
            return at + position
        at += max(1, len(view) - 3)
    return len(data)


def _is_intact(data: Media, page: _Page) -> bool:
    return page.end <= len(data) and _crc(bytes(data[page.at : page.end])) == 0


def _read_page(data: Media, at: int) -> _Page | None:
    """The page that begins at this byte. None if no page does."""
    head = data[at : at + _PAGE.size]
    if len(head) < _PAGE.size:
        return None
    sign, version, _, samples, serial, number, _, count = _PAGE.unpack(head)
    if sign != b"OggS" or version:
        return None
    end = at + _PAGE.size + count
    return _Page(at, end + sum(data[end - count : end]), samples, serial, number)


def _last_header(data: Media) -> _Page | None:
    """The last page before the audio."""
    previous, at = None, 0
    while at < _MOST_HEADERS:
        page = _read_page(data, at)
        if page is None or (previous is not None and page.serial != previous.serial):
            return None
        if page.samples > 0:
            return previous
        previous, at = page, page.end
    return None


def _pages_until(data: Media, at: int, serial: int, samples: int, least: int) -> Iterator[_Page]:
    """Yield pages from `at` to the first one that ends after `samples` samples and begins at byte `least` or later."""
    for _ in range(_MOST_PAGES):
        page = _read_page(data, at)
        if page is None or page.serial != serial or page.end > len(data):
            return
        yield page
        if page.samples > samples and page.at >= least:
            return
        at = page.end


def _crc(page: bytes) -> int:
    """Zero if the page's checksum is correct.

    Ogg's CRC differs from zlib's CRC-32 in bit order, initial value and final XOR.
    """
    stored, zeroed = page[22:26].translate(_TURNED), page[:22] + bytes(4) + page[26:]
    return zlib.crc32(zeroed.translate(_TURNED), 0xFFFFFFFF) ^ 0xFFFFFFFF ^ int.from_bytes(stored, "big")


_TURNED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
