"""Lists the rows of Parquet files with embedded media for a plan.

Purpose: `Tables.rows_of` asks the process that reads rows (`headrace.dataio.shards.ingest.row_reader`) for the layout and
the keys of a file.

Invariants:

* The packer itself parses no Parquet: a hostile footer can abort the process that does.
* Of an object in a store, only the footer and the column with the keys are copied.
* The process starts with the first file. Each request has a time limit.

Failure behaviour: a file that is not Parquet, and a schema that cannot become samples, raise `UsageError`. Errors of a
store pass through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, DeadlineError, NotFoundError, UsageError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.shards.ingest.embedded import FOOTER_BYTES, NOT_PARQUET, WRITE_HINT
from headrace.dataio.shards.ingest.grouping import Group, row_key
from headrace.dataio.shards.ingest.manifests import Columns
from headrace.dataio.shards.ingest.row_messages import (
    ROWS_HELLO,
    Keys,
    KeysTask,
    LayoutTask,
    Manifest,
    RowRef,
    TableRefused,
    decode_keys,
    decode_layout,
    encode_message,
)
from headrace.dataio.shards.ingest.row_pool import READER
from headrace.dataio.shards.ingest.source_stores import FileStat, SourceStores, is_url
from headrace.dataio.shards.workers.worker_pool import WorkerPool

_TAIL, _MAGIC = 8, b"PAR1"
_ANSWER_BYTES = 256 * limits.MIB
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddedRow:
    """A row that is a sample: its place, its key if the file has one for it, and about how many bytes its media have."""

    ref: RowRef
    key: str | None
    bytes: int


class Tables:
    """Lists rows. It is a context manager.

    Args:
        stores: the stores of the files.
        command: the command that starts the reading process.
    """

    def __init__(self, stores: SourceStores, command: Sequence[str] = READER) -> None:
        self._stores = stores
        self._pool = WorkerPool(command, ROWS_HELLO, 1, answer_bytes=_ANSWER_BYTES)

    def rows_of(
        self, path: str, info: FileStat, columns: Columns, stem: str, *, in_place: bool = False
    ) -> list[EmbeddedRow] | None:
        """Return the rows of a Parquet file with embedded media, or None if the file is a manifest.

        `path` is a path or a URL. `stem` is the key of the file. With `in_place`, a file with embedded media raises
        `UsageError`.
        """
        with self._local_footer(path, info) as (file, footer):
            task = LayoutTask(
                file=file,
                path=path,
                size=info.size,
                modified_ns=info.modified_ns,
                footer=footer,
                stem=stem,
                path_column=columns.path,
                key_column=columns.key,
                caption_column=columns.caption,
                bytes_columns=columns.bytes,
                file_columns=tuple(columns.files.values()),
                in_place=in_place,
            )
            layout = self._ask(path, task, info.size, decode_layout)
            if isinstance(layout, Manifest):
                return None
            if columns.files:
                raise UsageError(
                    f"{path}: it holds its media itself, so its samples have no further files in columns",
                    hint="--file-column is for manifests: pack them by themselves",
                )
            if is_url(path) and layout.keys:
                self._stores.copy_ranges(path, info.size, layout.keys, file)
            rows = list[EmbeddedRow]()
            for group in layout.groups:
                keys: Sequence[str | None] = (None,) * group.rows
                if group.key is not None:
                    keys = self._keys(KeysTask(file, group), info.size)
                size = group.unpacked // group.rows
                rows += [EmbeddedRow(RowRef(group, row), key, size) for row, key in enumerate(keys)]
            return rows

    def _keys(self, task: KeysTask, size: int) -> Sequence[str | None]:
        path = task.group.path
        answer: Keys = self._ask(path, task, size, decode_keys)
        if len(answer.keys) != task.group.rows:
            raise UsageError(f"{path}: {NOT_PARQUET}: it has fewer keys than rows", hint=WRITE_HINT)
        return answer.keys

    def _ask(self, path: str, task: object, size: int, decode: Callable[[bytes], T | TableRefused]) -> T:
        try:
            answer = self._pool.ask(encode_message(task), 60.0 + size / (16 * limits.MIB), decode)
        except (CorruptionError, DeadlineError) as error:
            raise UsageError(f"{path}: {NOT_PARQUET}: {error.message}", hint=WRITE_HINT) from error
        if isinstance(answer, TableRefused):
            raise UsageError(answer.message, hint=answer.hint)
        return answer

    @contextlib.contextmanager
    def _local_footer(self, path: str, info: FileStat) -> Iterator[tuple[str, int]]:
        """Yield the path of a file with the footer, and the position of the footer in it.

        Of an object, it is a file of the same size in which the rest is a hole.
        """
        start = max(0, info.size - _TAIL)
        if not is_url(path):
            try:
                with open(path, "rb") as file:
                    file.seek(start)
                    tail = file.read(_TAIL)
            except OSError as error:
                problem = f"cannot be read: {error.strerror or error}"
                raise NotFoundError(f"{path} {problem}", hint="check path and mode") from error
            yield path, _footer_position(path, info.size, tail)
            return
        with scratch_folder("headrace-pack-") as folder:
            local = str(Path(folder, "footer.parquet"))
            footer = _footer_position(path, info.size, self._stores.reader(path)(start, info.size - start))
            self._stores.copy_ranges(path, info.size, [(footer, info.size - footer)], local)
            yield local, footer

    def close(self) -> None:
        """Kill the process immediately."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def embedded_group(row: EmbeddedRow) -> Group:
    """Return the group of a row with embedded media."""
    ref = row.ref
    key = row_key(ref.display_name, row.key or ref.default_key)
    return Group(key, (("parquet", ref.group.path),), row.bytes, ref.group.modified_ns, (row.bytes,), row=ref)


def _footer_position(path: str, size: int, tail: bytes) -> int:
    length = int.from_bytes(tail[:4], "little")
    problem = ""
    if tail[4:] == b"PARE":
        problem = "its footer is encrypted"
    elif tail[4:] != _MAGIC:
        problem = "it does not end in PAR1"
    elif length > FOOTER_BYTES:
        problem = f"its footer is larger than {limits.format_bytes(FOOTER_BYTES)}"
    elif length + _TAIL + len(_MAGIC) > size:
        problem = "its footer is longer than the file"
    if problem:
        raise UsageError(f"{path}: {NOT_PARQUET}: {problem}", hint=WRITE_HINT)
    return size - _TAIL - length
