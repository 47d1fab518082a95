"""Convert a data set of mosaicml-streaming (MDS) to WebDataset tars with an index.

    python examples/migrate/from_mds.py s3://bucket/mds/train s3://bucket/dataset --file video=mp4 --check

Encoded media are copied byte for byte, and never decoded. Texts and numbers become fields of a JSON file, and arrays
become .npy files. The sample with number N of `StreamingDataset` has the key N, with ten digits. Interrupted, the same
command continues.

The script reads the shards itself: `StreamingDataset` decodes pictures, so their bytes would have to be encoded again.
"""

from __future__ import annotations

import argparse
import bz2
import functools
import gzip
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import IO, Any

import numpy as np
import zstandard
from tars import (
    Sample,
    SourceShard,
    choose_extensions,
    convert,
    extensions,
    finish,
    json_of,
    local_copy,
    npy_of,
    read_exactly,
)

from headrace import open_store
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.store.base import Store

FILES = {"bytes": None, "jpeg": "jpg", "png": "png", "ndarray": "npy"}
NUMBERS = {"int": "int64", **{kind: kind for kind in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32")}}
NUMBERS |= {kind: kind for kind in ("int64", "float16", "float32", "float64")}
TEXTS: Mapping[str, Any] = {"str": str, "str_int": int, "str_float": float, "str_decimal": str, "json": json.loads}
DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}
COMPRESSIONS: Mapping[str, Any] = {"zstd": zstandard.open, "gz": gzip.open, "bz2": bz2.open}


def array(kind: str, data: bytes) -> np.ndarray[Any, Any]:
    """Decode a column `ndarray`, `ndarray:DTYPE` or `ndarray:DTYPE:SHAPE`."""
    _, dtype, shape = (*kind.split(":"), "", "")[:3]
    at = 0
    if not dtype:
        dtype, at = DTYPES[data[0]], 1
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        dimensions, width = data[at] >> 2, 1 << data[at] % 4
        sizes = np.frombuffer(data, f"<u{width}", dimensions, at + 1).tolist()
        at += 1 + dimensions * width
    return np.frombuffer(data, dtype, offset=at).reshape(sizes)


def files_of(values: Iterator[tuple[str, str, bytes]], names: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a sample: media and arrays, and one JSON file with all other columns."""
    files, fields = dict[str, bytes](), dict[str, Any]()
    for name, kind, data in values:
        if name in names:
            files[names[name]] = npy_of(array(kind, data)) if kind.startswith("ndarray") else data
        elif kind in NUMBERS:
            fields[name] = np.frombuffer(data, NUMBERS[kind])[0].item()
        else:
            fields[name] = TEXTS[kind](data.decode())
    if fields:
        files["json"] = json_of(fields)
    return files


class MdsFolder:
    """The shards of a folder with an `index.json`."""

    def __init__(self, store: Store, chosen: Mapping[str, str]) -> None:
        found = json.loads(store.get("index.json", max_bytes=256 << 20))
        self._store, self._shards = store, found["shards"]
        if found["version"] != 2 or any(shard["format"] != "mds" for shard in self._shards):
            raise UnsupportedError("index.json is not of MDS, version 2", hint="write it again with MDSWriter")
        columns = sorted({pair for shard in self._shards for pair in zip(*self._columns(shard)[:2], strict=True)})
        formats = {name: kind.partition(":")[0] for name, kind in columns}
        if refused := sorted({*formats.values()} - {*FILES, *NUMBERS, *TEXTS}):
            hint = "write these columns as png, bytes or json with MDSWriter"  # a pickle could run code
            raise UnsupportedError(f"columns of the kinds {', '.join(refused)} are not converted", hint=hint)
        files = {name: FILES[kind] for name, kind in formats.items() if kind in FILES}
        self._names = choose_extensions(files, chosen)

    @staticmethod
    def _columns(shard: Mapping[str, Any]) -> tuple[list[str], list[str], list[int | None]]:
        return shard["column_names"], shard["column_encodings"], shard["column_sizes"]

    def shards(self) -> Iterator[SourceShard]:
        """All shards, in order."""
        first = 0
        for number, shard in enumerate(self._shards):
            yield SourceShard(f"{number:06}", functools.partial(self._samples, shard, first))
            first += shard["samples"]

    def _samples(self, shard: Mapping[str, Any], first: int) -> Iterator[Sample]:
        raw, count = shard["raw_data"], shard["samples"]
        with self._opened(shard) as file:
            head = np.frombuffer(read_exactly(file, 0, 4 * (count + 2)), "<u4").tolist()
            if head[0] != count:
                raise CorruptionError(f"{raw['basename']} has {head[0]} samples, and index.json says {count}")
            for number, (start, end) in enumerate(itertools.pairwise(head[1:])):
                row = read_exactly(file, start, end)
                yield f"{first + number:010}", files_of(self._values(row, shard), self._names)

    def _opened(self, shard: Mapping[str, Any]) -> AbstractContextManager[IO[bytes]]:
        """The raw bytes of a shard: of its raw file, or else of its compressed one."""
        raw, compressed = shard["raw_data"], shard["zip_data"]
        if compressed is None or self._store.exists(raw["basename"]):
            return local_copy(self._store, raw["basename"])
        kind = str(shard["compression"]).split(":")[0]
        if kind not in COMPRESSIONS:
            hint = "a StreamingDataset that was iterated once leaves decompressed shards in its folder `local`"
            raise UnsupportedError(f"{compressed['basename']}: compression {kind} is not supported", hint=hint)
        return local_copy(self._store, compressed["basename"], COMPRESSIONS[kind], raw["bytes"])

    def _values(self, row: bytes, shard: Mapping[str, Any]) -> Iterator[tuple[str, str, bytes]]:
        """(name, encoding, bytes) of each column of a row: first the sizes of those that vary, then the values."""
        names, kinds, fixed = self._columns(shard)
        at = 4 * sum(not size for size in fixed)
        varying = iter(np.frombuffer(row, "<u4", at // 4).tolist())
        for name, kind, size in zip(names, kinds, fixed, strict=True):
            length = size or next(varying)
            yield name, kind, row[at : at + length]
            at += length
        if at != len(row):
            raise CorruptionError(f"a row of {shard['raw_data']['basename']} has {len(row)} bytes, and {at} are used")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the folder or URL with index.json, such as s3://bucket/mds/train")
    parser.add_argument("dataset", help="where the dataset is written")
    parser.add_argument(
        "--file", action="append", default=[], metavar="COLUMN=EXT", help="the format of a bytes column"
    )
    parser.add_argument("--text-field", help="the column that is the text of a sample (default: caption)")
    parser.add_argument("--check", action="store_true", help="afterwards, compare all bytes of both")
    args = parser.parse_args()
    with open_store(args.source) as store:
        folder = MdsFolder(store, extensions(args.file))
        with convert(folder.shards(), args.dataset, text_field=args.text_field) as dataset:
            finish(folder.shards(), dataset, args.check)


if __name__ == "__main__":
    main()
