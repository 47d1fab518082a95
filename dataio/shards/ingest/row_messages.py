"""Rows of Parquet files with embedded media: how a plan names them, and the messages to the process that reads them.

Invariants:

* A plan holds the place of a row and nothing of its contents. All rows of a row group share one `RowGroup`.
* Messages are msgpack with checked types, never pickle.

Failure behaviour: a malformed message raises `msgspec.MsgspecError`.
"""

from __future__ import annotations

import msgspec

from headrace.dataio.shards.media.messages import Failure

ROWS_HELLO = b"headrace rows 1"
"""The first message of the process that reads rows."""


class EmbeddedColumn(msgspec.Struct, frozen=True):
    """A column of media. `member` is the first part of its files' extension, or "" for the sample's own medium."""

    name: str
    member: str = ""


class RowGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One row group of a Parquet file, and the columns that are no fields.

    Args:
        path: the path or URL of the file.
        size: the size of the file in bytes, when it was found.
        modified_ns: its modification time then, in nanoseconds.
        stem: the key of the file; without a key column, the keys of its rows begin with it.
        number: the number of the row group.
        first: the number of its first row in the file.
        rows: the number of its rows.
        offset: the position of its first byte in the file.
        length: the number of its bytes in the file.
        footer: the position of the footer in the file.
        unpacked: the bytes of its media columns, uncompressed, as the footer states them.
        media: the columns with media. The first has the sample's own medium.
        key: the column with the keys, or None.
        caption: the column with the captions, or None.
    """

    path: str
    size: int
    modified_ns: int
    stem: str
    number: int
    first: int
    rows: int
    offset: int
    length: int
    footer: int
    unpacked: int
    media: tuple[EmbeddedColumn, ...]
    key: str | None = None
    caption: str | None = None


class RowRef(msgspec.Struct, frozen=True):
    """Row `row` of a row group, counted from 0."""

    group: RowGroup
    row: int

    @property
    def display_name(self) -> str:
        """The name in messages to the user."""
        return f"{self.group.path}, row {self.group.first + self.row}"

    @property
    def default_key(self) -> str:
        """The key of the row if the file has no key for it."""
        return f"{self.group.stem}/{self.group.first + self.row:08}"


class RowTask(msgspec.Struct, frozen=True):
    """A request to write the media of a row to files in `folder`. `file` is the file or a local copy of it."""

    row: RowRef
    file: str
    folder: str


class RowFiles(msgspec.Struct, frozen=True, tag="row"):
    """The files of a row (extension, path), their total size in bytes, the caption and the fields (a JSON object)."""

    files: tuple[tuple[str, str], ...]
    bytes: int
    caption: str | None
    fields: str | None


RowResult = RowFiles | Failure

encode_row_task = msgspec.msgpack.Encoder().encode
decode_row_task = msgspec.msgpack.Decoder(RowTask).decode
encode_row_result = msgspec.msgpack.Encoder().encode
decode_row_result = msgspec.msgpack.Decoder(RowResult).decode
