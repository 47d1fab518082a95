"""Excerpts of Ogg (Opus and Vorbis), page by page.

Purpose: a page says how many samples there are up to its end, so that an instant is found in some reads; pages can be put
behind the file's headers as they are.
Invariants: pages are the file's, whole, from one that begins `_BEFORE` earlier than `low` to behind the one that holds `high`;
they keep their stamps, which count from the file's beginning. Only files of one stream, and not from its first page; not FLAC in
Ogg, of which libav counts what it gets.
Failure behaviour: None for everything else, and where no page begins where the one before ends; libav reads the file then.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction

import msgspec

from dataio.core import limits
from dataio.shards.contract import AudioInfo
from loaders.partial.file import Media
from loaders.sound.excerpts.contract import Excerpt
from loaders.sound.excerpts.seek import LOOKED_THROUGH, Mark, before

EXTENSIONS = frozenset(["ogg", "oga", "opus"])
_CODECS = frozenset(["opus", "vorbis"])
_BEFORE = Fraction(1, 10)
"""Seconds that pages say more than stamps do: what is left out at the beginning counts in them."""
_PAGE = struct.Struct("<4sBBqIIIB")
_MOST_HEADERS = 4 * limits.MIB


class _Page(msgspec.Struct, frozen=True):
    at: int
    end: int
    samples: int
    """Up to its end, by its last packet; -1 if none ends in it."""
    serial: int


def excerpt(data: Media, info: AudioInfo, low: Fraction, high: Fraction) -> Excerpt | None:
    """From `low` to `high`, seconds of the file's own time line."""
    rate = 48_000 if info.codec == "opus" else info.sample_rate  # in which pages count
    head = _headers(data) if info.codec in _CODECS else None
    if head is None:
        return None

    def find(at: int) -> Mark | None:
        page = _page_after(data, at, head.serial)
        return None if page is None else (page.end, page.samples)

    whole = len(data), info.samples * rate // info.sample_rate
    first, _ = before(find, (head.end, 0), whole, int((low - _BEFORE) * rate))
    pages = list(_until(data, first, head.serial, int((high + _BEFORE) * rate)))
    if not pages or first == head.end:
        return None
    return Excerpt([data[: head.end], data[first : pages[-1].end]], "ogg")


def _page(data: Media, at: int) -> _Page | None:
    """The page that begins there, if one does."""
    head = data[at : at + _PAGE.size]
    if len(head) < _PAGE.size:
        return None
    sign, version, _, samples, serial, _, _, count = _PAGE.unpack(head)
    if sign != b"OggS" or version:
        return None
    end = at + _PAGE.size + count
    return _Page(at, end + sum(data[end - count : end]), samples, serial)


def _headers(data: Media) -> _Page | None:
    """The last page before the sound."""
    last, at = None, 0
    while at < _MOST_HEADERS:
        page = _page(data, at)
        if page is None or (last is not None and page.serial != last.serial):
            return None
        if page.samples > 0:
            return last
        last, at = page, page.end
    return None


def _page_after(data: Media, at: int, serial: int) -> _Page | None:
    """The first page from there on in which a packet ends."""
    for size in LOOKED_THROUGH:
        view, found = bytes(data[at : at + size]), -1
        while (found := view.find(b"OggS", found + 1)) >= 0:
            page = _page(data, at + found)
            if page is not None and page.serial == serial and page.samples >= 0:
                return page
    return None


def _until(data: Media, at: int, serial: int, wanted: int) -> Iterator[_Page]:
    """Pages from there to the one behind which there are more than `wanted` samples."""
    while (page := _page(data, at)) is not None and page.serial == serial and page.end <= len(data):
        yield page
        if page.samples > wanted:
            return
        at = page.end
