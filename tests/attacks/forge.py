"""A small good dataset, and copies of it with a forged index or version whose digests are all right."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataio import index
from headrace.dataio.core.json import seal
from headrace.dataio.shards.index.pages import digest
from headrace.dataio.shards.index.rows import BLOCKS, block_digests
from headrace.dataio.shards.query.part_writer import footer_bytes

VERSION = "versions/00000001.json"


def good(folder: Path) -> Path:
    """A dataset of two samples in one shard of its own, members of 600 and 5 bytes."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in (("a.bin", b"1" * 600), ("b.bin", b"22222"), ("b.json", b'{"w": 3}')):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / "a.tar").write_bytes(sink.getvalue())
    index(folder / "shards" / "a.tar", folder).close()
    return folder


def copy(source: Path, target: Path) -> Path:
    """The dataset again, at another place."""
    shutil.copytree(source, target)
    return target


def forged(folder: Path, attacks: Sequence[Callable[[Path], None]]) -> list[Path]:
    """A good dataset, then a copy for each attack, as it left it: `good`, `0`, `1` and on."""
    places = [good(folder / "good")]
    for number, attack in enumerate(attacks):
        places.append(copy(places[0], folder / str(number)))
        attack(places[-1])
    return places


def document(folder: Path) -> dict[str, Any]:
    """The version document without its digest."""
    found: dict[str, Any] = json.loads((folder / VERSION).read_bytes())
    found.pop("digest")
    return found


def with_document(folder: Path, text: bytes) -> None:
    """Store another version document, sealed."""
    (folder / VERSION).write_bytes(seal(text))


def as_text(found: dict[str, Any]) -> bytes:
    """A document as it is stored."""
    return json.dumps(found, indent=1).encode() + b"\n"


def change_document(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the version document in place and seal it."""
    found = document(folder)
    change(found)
    with_document(folder, as_text(found))


def with_part(folder: Path, data: bytes, rows: int | None = None) -> None:
    """Store other bytes as the index part, named by a version that has the right size and digest for them."""
    found = document(folder)
    part = found["index"][0]
    (folder / part["key"]).write_bytes(data)
    footer = min(footer_bytes(data), len(data))
    part |= {"size": len(data), "digest": digest(data), "footer": footer, "footer_digest": digest(data[-footer:])}
    part["pages"] = None  # so that all is looked up in the tables
    if rows is not None:
        part["rows"] = rows
    with_document(folder, as_text(found))


def table(folder: Path) -> Any:
    """The index part as an Arrow table."""
    return pq.ParquetFile(folder / document(folder)["index"][0]["key"]).read(use_threads=False)


def change_rows(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the rows of the index part, keeping its schema."""
    old = table(folder)
    rows = old.to_pylist()
    change(rows)
    with_part(folder, parquet(pa.Table.from_pylist(rows, schema=old.schema)))


def parquet(changed: Any) -> bytes:
    """A table as Parquet, with the digests of its blocks in the footer."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, changed.schema, compression="zstd") as writer:
        writer.write_table(changed)
        digests = base64.b64encode(b"".join(block_digests(sink.getbuffer())))
        writer.add_key_value_metadata({BLOCKS: digests})
    return sink.getvalue()
