"""Statistics of a dataset, from its index and its version document.

Invariant: every statistic is a sum or a count over the index's columns or the document. Only the first `MOST_TAGS` tags
are searched.
Failure behaviour: errors from reading the index and the tags pass through.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow.compute as pc

from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.versions import tags

MOST_TAGS = 200
_COLUMNS = ("duration", "width", "height", "frames", "video_codec", "audio_codec", "sample_rate", "text")
_COLOR = ("color_space", "color_range", "color_primaries", "color_transfer")


def summary(dataset: Dataset) -> dict[str, Any]:
    """Statistics in plain JSON types: seconds, bytes, and counts of codecs and sizes, most frequent first."""
    table = dataset.columns((*_COLUMNS, *_COLOR))
    video = pc.is_valid(table["video_codec"])
    return {
        "url": dataset.url,
        "name": dataset.name,
        "version": dataset.version,
        "digest": dataset.digest,
        "created": dataset.document.created,
        "message": dataset.document.message,
        "parent": dataset.document.parent,
        "trunk": dataset.document.trunk == dataset.version,
        "made_from": [msgspec.to_builtins(source) for source in dataset.lineage.sources],
        "where": list(dataset.lineage.where),
        "tags": tags_of(dataset),
        "samples": len(dataset),
        "shards": len(dataset.document.shards),
        "bytes": sum(shard.size for shard in dataset.document.shards),
        "member_bytes": dataset.total_bytes,
        "seconds": pc.sum(table["duration"], min_count=0).as_py(),
        "video_seconds": pc.sum(table["duration"].filter(video), min_count=0).as_py(),
        "video_frames": pc.sum(table["frames"], min_count=0).as_py(),
        "with_text": table.num_rows - table["text"].null_count,
        "video_codecs": _counts(table, ["video_codec"]),
        "audio_codecs": _counts(table, ["audio_codec"]),
        "sizes": _counts(table, ["width", "height"]),
        "sample_rates": _counts(table, ["sample_rate"]),
        "colors": _counts(table, list(_COLOR), "/"),
    }


def tags_of(dataset: Dataset) -> list[str]:
    """The tags of this version. For a view, the tags of the version that it narrows."""
    names = sorted(tags.names(dataset.store))[:MOST_TAGS]
    return [name for name in names if tags.read(dataset.store, name).version == dataset.version]


def _counts(table: Any, columns: list[str], between: str = "x") -> dict[str, int]:
    there = table.select(columns).filter(pc.is_valid(table[columns[0]]))
    grouped = there.group_by(columns, use_threads=False).aggregate([([], "count_all")]).to_pylist()
    rows = [(between.join(str(row[c]) for c in columns), int(row["count_all"])) for row in grouped]
    return dict(sorted(rows, key=lambda row: (-row[1], row[0])))
