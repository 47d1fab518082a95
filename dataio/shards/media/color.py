"""The color properties of a decoded picture.

Purpose: translate libav's code points (those of ITU-T H.273) to libav's names, as ffprobe prints them.
Invariant: a property that the file does not state is "unknown". The picture's size is never used to guess it.
Failure behaviour: none; a code point without a name here is "unknown".
"""

from __future__ import annotations

from typing import Any

from headrace.dataio.shards.sample import Color

UNKNOWN = "unknown"

RANGES = {1: "tv", 2: "pc"}
SPACES = {
    0: "gbr",
    1: "bt709",
    4: "fcc",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "ycgco",
    9: "bt2020nc",
    10: "bt2020c",
    11: "smpte2085",
    12: "chroma-derived-nc",
    13: "chroma-derived-c",
    14: "ictcp",
}
PRIMARIES = {
    1: "bt709",
    4: "bt470m",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "film",
    9: "bt2020",
    10: "smpte428",
    11: "smpte431",
    12: "smpte432",
    22: "ebu3213",
}
TRANSFERS = {
    1: "bt709",
    4: "bt470m",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "linear",
    9: "log100",
    10: "log316",
    11: "iec61966-2-4",
    12: "bt1361e",
    13: "iec61966-2-1",
    14: "bt2020-10",
    15: "bt2020-12",
    16: "smpte2084",
    17: "smpte428",
    18: "arib-std-b67",
}


def color_of(frame: Any) -> Color:
    """Return the color properties of a decoded PyAV frame."""
    return Color(
        SPACES.get(int(frame.colorspace), UNKNOWN),
        RANGES.get(int(frame.color_range), UNKNOWN),
        PRIMARIES.get(int(frame.color_primaries), UNKNOWN),
        TRANSFERS.get(int(frame.color_trc), UNKNOWN),
    )
