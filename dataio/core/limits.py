"""Limits on sizes, counts and rates, checks of free memory, and the parsing of sizes.

Invariant: code that parses external data, queues, retries or waits has a limit, from this module or from its caller.

Failure behaviour: `parse_bytes` raises `UsageError` with the text. `check_memory` raises `CapacityError`.
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
"""The largest object that `Store.get` returns unless its caller raises the limit: documents, manifests, index parts."""
JSON_DOCUMENT_BYTES = 16 * MIB
"""The largest JSON or msgpack document that is read from a store."""
JSON_DEPTH = 32
JSON_NUMBER_DIGITS = 300
"""The most digits of an integer in a JSON document; a float has fewer."""
SAMPLE_JSON_BYTES = 4 * MIB
"""The largest JSON of one sample. Parsed, it takes up to thirty times as much memory."""
FRAME_PIXELS = 64 * MIB
"""The most pixels of a video frame: 8192x8192. A larger one is never decoded."""
CLIP_PIXELS = 1 << 37
"""The most pixels that are decoded for one clip, including the frames from the preceding key frame to its start.

This is enough for 35 minutes of 1920x1080 at 30 frames a second.
"""
VIDEO_FRAMES = 2_000_000
"""The most frames of one video: 18 hours at 30 frames a second."""
AUDIO_VALUES = 1 << 32
"""The most audio samples of one recording, over all channels: 12 hours of stereo at 48 kHz."""
PROBE_MEMORY_BYTES = 3 * GIB
"""The limit on the data segment (RLIMIT_DATA) of a process that reads untrusted media."""
TAR_HEADER_BYTES = 1 * MIB
"""The most bytes of pax or GNU long-name headers of one tar member."""
CHECKED_BYTES = 256 * MIB
"""Smaller allocations are made without checking the free memory."""
WORKERS = 1024
"""The most processes that read media at the same time on one machine."""
CACHE_BLOCK_BYTES = 4 * MIB
LEAST_RATE = 64 * KIB
"""The lowest rate of a network request in bytes per second. A slower request is aborted.

It is low because many requests may share a slow link.
"""
MESSAGE_BYTES = 64 * KIB
"""The largest message on the sidecar's socket."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": KIB, "m": MIB, "g": GIB, "t": 1 << 40, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def memory_bytes() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Return the bytes of memory that are free on this machine, and under the limit of each of its control groups."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available, swap = (int(lines.get(name, "0 kB").split()[0]) * KIB for name in ("MemAvailable", "SwapFree"))
    free = available + swap
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            free = min(free, _free_in_group(group, swap))
    return free


_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
"""The memory in a control group's `memory.stat` that the kernel frees when it is needed."""


def _control_groups() -> list[Path]:
    """The folders of this process's control group (version 2) and its parents. A container sees its own as the root."""
    own_group = ""
    with contextlib.suppress(OSError):
        own_group = next((line[3:] for line in _OWN_CGROUP.read_text().splitlines() if line.startswith("0::")), "")
    names = [name for name in own_group.split("/") if name and name != ".."]
    return [_CGROUPS.joinpath(*names[:count]) for count in range(len(names) + 1)]


def _free_in_group(group: Path, swap: int) -> int:
    """The bytes that are free under the group's limit, with at most `swap` bytes of swap space."""
    free = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    free += sum(int(stat.get(name, 0)) for name in _RECLAIMABLE)
    with contextlib.suppress(OSError, ValueError):
        used = int((group / "memory.swap.current").read_text())
        swap = min(swap, int((group / "memory.swap.max").read_text()) - used)
    return max(0, free) + max(0, swap)


def check_memory(size: int, what: str) -> None:
    """Raise `CapacityError` if `what` needs more memory than is free. Stored data may claim any size."""
    if size > CHECKED_BYTES and size > (free := free_memory()):
        raise CapacityError(
            f"{what} takes {format_bytes(size)} of memory, and {format_bytes(free)} are free", hint=MORE_MEMORY
        )


def parse_bytes(text: str) -> int:
    """Parse a size such as `4MiB`, `256M` (both binary), `1.5GB` (decimal) or `1048576`, and return it in bytes."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size", hint="write for example 64MiB, 1.5GB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def counted(n: int, what: str) -> str:
    """Format a count: "1 file", "2 files"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def format_bytes(n: float) -> str:
    """Format a size with a binary unit: "512 B", "1.5 KiB", "200 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
