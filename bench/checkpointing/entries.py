"""Which candidates the checkpoint benchmark has, without importing any of them.

Invariant: an entry names the function that builds it, the packages that it needs beside Headrace, where it can save to, and
how many ranks it can have. Failure behaviour: `runs_here` says in words why one cannot run.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

PLACES = ("disk", "tmpfs", "s3")
OURS = "headrace"


@dataclass(frozen=True)
class Entry:
    """`build` is `module:function` in `headrace.bench.checkpointing`, called as `function(where, training, **options)`."""

    build: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    places: tuple[str, ...] = ("disk", "tmpfs")
    ranks: bool = False
    """Whether it can have several."""


ENTRIES: dict[str, Entry] = {
    OURS: Entry("ours:headrace", places=PLACES, ranks=True),
    "headrace, lazy": Entry("ours:headrace", {"staging": "lazy"}, places=PLACES, ranks=True),
    "headrace, auto compression": Entry("ours:headrace", {"compression": "auto"}, places=PLACES, ranks=True),
    "headrace, sidecar on another core": Entry("ours:with_sidecar"),
    "floor: memcpy, O_DIRECT, BLAKE3": Entry("floor:floor"),
    "torch.save": Entry("peers:torch_save"),
    "safetensors": Entry("peers:safetensors", needs=("safetensors",)),
    "dcp.save": Entry("peers:dcp", {"kind": "sync"}, ranks=True),
    "dcp.async_save": Entry("peers:dcp", {"kind": "thread"}, ranks=True),
    "dcp.async_save, stager": Entry("peers:dcp", {"kind": "stager"}, ranks=True),
    "dcp.async_save, process": Entry("peers:dcp", {"kind": "process"}, ranks=True),
    "torch_checkpointing": Entry("peers:torch_checkpointing", needs=("torch_checkpointing",)),
    "s3torchconnector's dcp": Entry(
        "peers:s3torchconnector", needs=("s3torchconnector", "tenacity"), places=("s3",), ranks=True
    ),
    "dcp.save, fsspec": Entry("peers:dcp_fsspec", needs=("s3fs",), places=("s3",), ranks=True),
}
SHORT = (
    *(OURS, "headrace, lazy", "floor: memcpy, O_DIRECT, BLAKE3", "torch.save", "safetensors"),
    *("dcp.save", "dcp.async_save", "dcp.async_save, stager", "s3torchconnector's dcp"),
)
"""What `make bench` runs."""


def runs_here(entry: Entry, place: str, ranks: int) -> str | None:
    """None, or why the candidate cannot run so."""
    if place not in entry.places:
        return f"saves to {' and '.join(entry.places)} only"
    if ranks > 1 and not entry.ranks:
        return "knows nothing of several ranks"
    missing = [name for name in entry.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None
