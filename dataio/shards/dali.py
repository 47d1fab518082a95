"""The index file with which DALI's `readers.webdataset` reads a shard without scanning it.

Invariant: one line a sample, in the order of the shard, with extension, payload offset and length of each member; offsets are
those of the sample index, so members behind pax and GNU headers are right too.
Failure behaviour: `NotFoundError` for a shard that the version does not hold, `UnsupportedError` for an extension with white
space, which the format cannot express.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from headrace.dataio.core.errors import NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

_VERSION = "v1.1"


def dali_index(dataset: Dataset, shard: str) -> str:
    """The index file's content for the shard of this key (`dataset.document.shards`), as `index_paths` wants it."""
    table = dataset.columns(["shard", "members"])
    rows = table.filter(pc.equal(table["shard"], shard))["members"]
    if shard not in {known.key for known in dataset.document.shards}:
        raise NotFoundError(f"{dataset.url} version {dataset.version} has no shard {shard!r}", hint="`headrace info`")
    return "\n".join([f"{_VERSION} {len(rows)}", *(_line(members.as_py(), shard) for members in rows)]) + "\n"


def _line(members: list[dict[str, Any]], shard: str) -> str:
    return " ".join(_component(member, shard) for member in members)


def _component(member: dict[str, Any], shard: str) -> str:
    if len(member["ext"].split()) != 1 or not member["ext"].isprintable():
        raise UnsupportedError(f"{shard}: DALI's index cannot name the extension {member['ext']!r}")
    return f"{member['ext']} {member['offset']} {member['length']}"
