"""Parquet files with embedded media: how a plan names their rows, and the messages to the process that reads them.

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


# --- requests


class LayoutTask(msgspec.Struct, frozen=True, kw_only=True, tag="layout"):
    """A request for the layout of a Parquet file.

    Args:
        file: the file, or a file of the same size that has its footer.
        path: the path or URL of the file, for messages and for `RowGroup`.
        size: its size in bytes.
        modified_ns: its modification time in nanoseconds.
        footer: the position of its footer.
        stem: the key of the file.
        path_column: the column that makes it a manifest.
        key_column: the column with the keys.
        caption_column: the column with the captions.
        bytes_columns: the columns with media that the user names.
        file_columns: the columns with further files that the user names. They make it a manifest, too.
        in_place: whether to refuse a file with embedded media.
    """

    file: str
    path: str
    size: int
    modified_ns: int
    footer: int
    stem: str
    path_column: str
    key_column: str
    caption_column: str
    bytes_columns: tuple[str, ...]
    file_columns: tuple[str, ...] = ()
    in_place: bool = False


class KeysTask(msgspec.Struct, frozen=True, tag="keys"):
    """A request for the keys of the rows of a row group. `file` is the file, or a file with its footer and its keys."""

    file: str
    group: RowGroup


class RowTask(msgspec.Struct, frozen=True, tag="row"):
    """A request to write the media of a row to files in `folder`. `file` is the file or a local copy of it."""

    row: RowRef
    file: str
    folder: str


# --- answers


class TableRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The file cannot become samples. The fields are those of a `UsageError`."""

    message: str
    hint: str


class Manifest(msgspec.Struct, frozen=True, tag="manifest"):
    """The file has no embedded media, or has a column with paths. So it is a manifest."""


class Layout(msgspec.Struct, frozen=True, tag="layout"):
    """The row groups with rows, and where in the file the keys of each begin and how long they are (none: no keys)."""

    groups: tuple[RowGroup, ...]
    keys: tuple[tuple[int, int], ...]


class Keys(msgspec.Struct, frozen=True, tag="keys"):
    """The key of each row. None means that the row has none."""

    keys: tuple[str | None, ...]


class RowFiles(msgspec.Struct, frozen=True, tag="row"):
    """The files of a row (extension, path), their total size in bytes, the caption and the fields (a JSON object)."""

    files: tuple[tuple[str, str], ...]
    bytes: int
    caption: str | None
    fields: str | None


LayoutResult = Layout | Manifest | TableRefused
KeysResult = Keys | TableRefused
RowResult = RowFiles | Failure

encode_message = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(LayoutTask | KeysTask | RowTask).decode
decode_layout = msgspec.msgpack.Decoder(LayoutResult).decode
decode_keys = msgspec.msgpack.Decoder(KeysResult).decode
decode_row = msgspec.msgpack.Decoder(RowResult).decode
