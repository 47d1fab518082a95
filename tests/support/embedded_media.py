"""Parquet files with embedded media, in the layout that Hugging Face `datasets` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""The type of a column with the feature `Image`, `Audio` or `Video`."""


def cell(path: Path) -> dict[str, Any]:
    """A file as the cell of such a column."""
    return {"bytes": path.read_bytes(), "path": path.name}


def write_embedded(
    path: Path, media: Mapping[str, Sequence[Any]], others: Mapping[str, Sequence[Any]] | None = None, **options: Any
) -> Path:
    """Write columns with media and other columns. `options` are those of `pyarrow.parquet.write_table`."""
    columns = {name: pa.array(cells, EMBEDDED) for name, cells in media.items()}
    table = pa.table(columns | {name: pa.array(values) for name, values in (others or {}).items()})
    features = {name: {"_type": "Image"} for name in media}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **({"compression": "none", "use_dictionary": False} | options))
    return path
