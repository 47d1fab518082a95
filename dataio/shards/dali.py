"""Index files for DALI's `readers.webdataset`, which can then read a shard without scanning it.

Invariant: a file has one line for each sample, in the order of the shard, with the extension, payload offset and length
of each member. The offsets come from the sample index, so they are also correct for members with pax and GNU headers.
Failure behaviour: `NotFoundError` for a shard that the version does not hold. `UnsupportedError` for an extension with
white space or unprintable characters, which the format cannot express.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from headrace.dataio.core.errors import NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

_VERSION = "v1.1"


def dali_index(dataset: Dataset, shard: str) -> str:
    """The content of the index file for the shard with this key (`dataset.document.shards`), for DALI's
    `index_paths`."""
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
