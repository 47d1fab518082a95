"""Limits on what is read, sent and waited for, and the parsing of sizes that people write.

Invariant: whatever parses from outside, queues, retries or waits takes its bound from here or from its caller.
Failure behaviour: `parse_bytes` raises `UsageError` naming the text.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from headrace.dataio.core.errors import MORE_MEMORY, CapacityError, UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

OBJECT_KEY_BYTES = 1024
"""S3's own limit on the length of a key."""
SMALL_OBJECT_BYTES = 64 * MIB
"""The most that `Store.get` returns whole unless its caller raises it: documents, manifests and index parts."""
JSON_DOCUMENT_BYTES = 16 * MIB
"""The most that a JSON or msgpack document read from a store may hold."""
JSON_DEPTH = 32
JSON_NUMBER_DIGITS = 300
"""The most digits that an integer in a JSON document may have; a float has fewer."""
SAMPLE_JSON_BYTES = 4 * MIB
"""The most that the JSON of one sample may hold: parsed, it takes up to thirty times as much."""
FRAME_PIXELS = 64 * MIB
"""The most pixels that a video frame may have: 8192x8192. A larger one is never decoded."""
CLIP_PIXELS = 1 << 37
"""The most pixels that are decoded for one clip, from the key frame before it on: 35 minutes of 1920x1080 at 30 a
second.
"""
VIDEO_FRAMES = 2_000_000
"""The most frames that one video may have: 18 hours at 30 a second."""
AUDIO_VALUES = 1 << 32
"""The most samples, of all channels together, that one sound may have: 12 hours of stereo at 48 kHz."""
PROBE_MEMORY_BYTES = 3 * GIB
"""The most memory that a process reading untrusted media may have for data."""
TAR_HEADER_BYTES = 1 * MIB
"""The most that pax or GNU long-name headers of one tar member may hold."""
CHECKED_BYTES = 256 * MIB
"""What takes no more is allocated without a look at how much memory is free."""
WORKERS = 1024
"""The most processes that read media side by side on one machine."""
CACHE_BLOCK_BYTES = 4 * MIB
LEAST_RATE = 64 * KIB
"""Bytes a second below which a request over the network is given up, also while many requests share a slow link."""
MESSAGE_BYTES = 64 * KIB
"""The most that one message on the sidecar's socket may hold."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": KIB, "m": MIB, "g": GIB, "t": 1 << 40, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that this machine has left for its processes, and its container allows for one at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = sum(int(lines[name].split()[0]) * KIB for name in ("MemAvailable", "SwapFree") if name in lines)
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


def check_memory(size: int, what: str) -> None:
    """`CapacityError` if `what` takes more memory than there is: what is stored may name any size."""
    if size > CHECKED_BYTES and size > (free := free_memory()):
        raise CapacityError(
            f"{what} takes {format_bytes(size)} of memory, and {format_bytes(free)} are free", hint=MORE_MEMORY
        )


def parse_bytes(text: str) -> int:
    """Bytes in a size such as `4MiB`, `256M` (both binary), `1.5GB` (decimal) or `1048576`."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size", hint="write for example 64MiB, 1.5GB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def counted(n: int, what: str) -> str:
    """So many of something, for people: "1 file", "2 files"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def format_bytes(n: float) -> str:
    """A size for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
