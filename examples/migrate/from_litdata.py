"""Convert a data set of litData (`optimize`) to WebDataset tars with an index.

    python examples/migrate/from_litdata.py s3://bucket/litdata s3://bucket/dataset --file clip=mp4 --check

Encoded media are copied byte for byte, and never decoded. Texts, numbers and JSON become fields of a JSON file, and
arrays become .npy files. The sample with number N of `StreamingDataset` has the key N, with ten digits. Interrupted, the
same command continues.

`pip install litdata` where this script runs: litData then reads its own chunks. Without it, the script reads plain
chunks, which are not compressed and hold media, texts and numbers.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import operator
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tars import (
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

MEDIA = {"bytes": None, "file": None, "jpeg": "jpg", "image": "jpg", "video": "mp4", "audio": "wav", "tifffile": "tif"}
"""Formats of encoded media, with their extension. `video:webm` has its own."""
PLAIN: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(MEDIA, bytes),
    "str": bytes.decode,
    "text": bytes.decode,
    "int": lambda data: struct.unpack("<q", data)[0],
    "float": lambda data: struct.unpack("<d", data)[0],
    "bool": lambda data: data != b"\0",
}
ARRAYS = {"tensor", "no_header_tensor", "numpy", "no_header_numpy"}
Row = Sequence[Any]
"""The values of a sample in the order of `data_format`."""


def paths_of(spec: Mapping[str, Any], path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of each value in a sample: its keys and positions."""
    if spec["type"] is None:
        yield path
        return
    children = spec["children_spec"]
    keys = json.loads(spec["context"]) if spec["type"].endswith("dict") else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from paths_of(child, (*path, key))


class LitdataFolder:
    """The chunks of a folder with an `index.json`. litData keeps the chunks that it reads in the folder `cache`."""

    def __init__(self, store: Store, url: str, chosen: Mapping[str, str], cache: str) -> None:
        found = json.loads(store.get("index.json", max_bytes=256 << 20))
        self._store, self._url, self._cache = store, url, cache
        self._config, self._chunks = found["config"], found["chunks"]
        if self._config.get("item_loader") not in (None, "PyTreeLoader") or not self._config.get("data_spec"):
            raise UnsupportedError("index.json is not of samples that `optimize` wrote", hint="see the list of formats")
        formats: list[str] = self._config["data_format"]
        self._paths = list(paths_of(json.loads(self._config["data_spec"])[1]))
        self._names = ["_".join(map(str, path)) or "value" for path in self._paths]
        self._kinds = [kind.partition(":")[0] for kind in formats]
        if refused := sorted({*self._kinds} - {*PLAIN, *ARRAYS, "json"}):
            hint = "write these values as bytes or numbers with litdata.optimize"  # a pickle could run code
            raise UnsupportedError(f"values of the formats {', '.join(refused)} are not converted", hint=hint)
        if len({*self._names}) < len(self._names):
            raise UnsupportedError("two values have the same path with _ between its parts", hint="rename one of them")
        files = dict[str, str | None]()
        for name, kind, format in zip(self._names, self._kinds, formats, strict=True):
            if kind in MEDIA or kind in ARRAYS:
                files[name] = "npy" if kind in ARRAYS else format.partition(":")[2] or MEDIA[kind]
        self._extensions = choose_extensions(files, chosen)

    def shards(self) -> Iterator[SourceShard]:
        """All chunks, in order."""
        read = self._rows_of_library() if importlib.util.find_spec("litdata") else self._plain_rows
        first = 0
        for number, chunk in enumerate(self._chunks):
            samples = functools.partial(self._samples, read, chunk, first)
            yield SourceShard(f"{number:06}", samples)
            first += chunk["chunk_size"]

    def _samples(
        self, read: Callable[[Mapping[str, Any], int], Iterator[Row]], chunk: Mapping[str, Any], first: int
    ) -> Iterator[tuple[str, dict[str, bytes]]]:
        for number, row in enumerate(read(chunk, first), first):
            yield f"{number:010}", self._files(row)

    def _files(self, row: Row) -> dict[str, bytes]:
        """The files of a sample: media and arrays, and one JSON file with all other values."""
        files, fields = dict[str, bytes](), dict[str, Any]()
        for name, kind, value in zip(self._names, self._kinds, row, strict=True):
            if name in self._extensions:
                files[self._extensions[name]] = npy_of(value) if kind in ARRAYS else bytes(value)
            else:
                fields[name] = value
        if fields:
            files["json"] = json_of(fields)
        return files

    def _rows_of_library(self) -> Callable[[Mapping[str, Any], int], Iterator[Row]]:
        """Let litData read, with serializers that return media as they are stored."""
        from litdata import StreamingDataset
        from litdata.streaming.serializers import BytesSerializer

        as_stored = {kind: BytesSerializer() for kind in {*self._kinds} & MEDIA.keys()}
        dataset = StreamingDataset(self._url, cache_dir=self._cache, max_cache_size="1GB", serializers=as_stored)

        def read(chunk: Mapping[str, Any], first: int) -> Iterator[Row]:
            for number in range(first, first + chunk["chunk_size"]):
                tree = dataset[number]
                yield [functools.reduce(operator.getitem, path, tree) for path in self._paths]

        return read

    def _plain_rows(self, chunk: Mapping[str, Any], first: int) -> Iterator[Row]:
        """Read a chunk that is not compressed: the number of rows, their positions, and the rows."""
        config, count = self._config, chunk["chunk_size"]
        if not {*self._kinds} <= PLAIN.keys() or any(
            config.get(name) for name in ("compression", "ipc_compression", "encryption")
        ):
            raise UnsupportedError("these chunks need litData to be read", hint="pip install litdata")
        with local_copy(self._store, chunk["filename"]) as file:
            head = np.frombuffer(read_exactly(file, 0, 4 * (count + 2)), "<u4").tolist()
            if head[0] != count:
                raise CorruptionError(f"{chunk['filename']} has {head[0]} rows, and index.json says {count}")
            for start, end in itertools.pairwise(head[1:]):
                yield self._values(read_exactly(file, start, end), chunk["filename"])

    def _values(self, row: bytes, name: str) -> list[Any]:
        """The values of a row: first the sizes of all values, then the values."""
        at, found = 4 * len(self._kinds), list[Any]()
        for kind, size in zip(self._kinds, np.frombuffer(row, "<u4", len(self._kinds)).tolist(), strict=True):
            found.append(PLAIN[kind](row[at : at + size]))
            at += size
        if at != len(row):
            raise CorruptionError(f"a row of {name} has {len(row)} bytes, and {at} are used")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the folder or URL with index.json, such as s3://bucket/litdata")
    parser.add_argument("dataset", help="where the dataset is written")
    parser.add_argument(
        "--file", action="append", default=[], metavar="NAME=EXT", help="the format of a value of bytes"
    )
    parser.add_argument("--text-field", help="the value that is the text of a sample (default: caption)")
    parser.add_argument("--check", action="store_true", help="afterwards, compare all bytes of both")
    args = parser.parse_args()
    with open_store(args.source) as store, tempfile.TemporaryDirectory(prefix="from-litdata-") as cache:
        folder = LitdataFolder(store, args.source, extensions(args.file), cache)
        with convert(folder.shards(), args.dataset, text_field=args.text_field) as dataset:
            finish(folder.shards(), dataset, args.check)


if __name__ == "__main__":
    main()
