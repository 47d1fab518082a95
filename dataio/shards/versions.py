"""Dataset versions: the documents that make shards and index parts a dataset.

Purpose: `dataset.json` names a dataset; `versions/00000042.json` is one immutable snapshot of it.
Invariants: a version exists when, and only when, its document does. It is written last, by `put_if_absent` with a nonce,
so of several writers exactly one makes a version, and everything that it names was stored before. Documents hold no
secrets and no paths of the machine that wrote them.
Failure behaviour: `NotFoundError` lists the versions that exist; `ConflictError` says who won; `CorruptionError` for a document
that cannot be parsed or contradicts itself; `UnsupportedError` for a newer format.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from dataio.core import limits
from dataio.core.errors import CapacityError, ConflictError, CorruptionError, NotFoundError, UnsupportedError
from dataio.shards import seal
from dataio.shards.index import digest
from dataio.store.contract import Store
from dataio.store.mounts import MAX_MOUNTS, PREFIX

FORMAT = 1
DATASET_KEY = "dataset.json"
_VERSION_KEY = re.compile(r"versions/(\d{8})\.json")


class DatasetDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`dataset.json`."""

    format: int
    name: str
    nonce: str


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One tar of a version; `size` in bytes."""

    key: str
    size: int
    samples: int


class IndexPart(msgspec.Struct, frozen=True, kw_only=True):
    """One Parquet file of a version; `digest` is its BLAKE3."""

    key: str
    size: int
    rows: int
    digest: str


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """Where shards lie whose keys begin with `mounts/<name>/`: a store's URL and its options without secrets."""

    name: str
    url: str
    options: dict[str, Any] = {}


class VersionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`versions/<version>.json`. Parts are in the order of their samples' numbers.

    `mounts` are the stores of shards that were indexed in place; whoever makes a version out of others carries them over.
    """

    format: int
    version: int
    parent: int | None
    name: str
    created: str
    nonce: str
    message: str
    samples: int
    shards: tuple[Shard, ...]
    index: tuple[IndexPart, ...]
    mounts: tuple[Mount, ...] = ()

    def shard_sizes(self) -> Mapping[str, int]:
        """Shard key → bytes."""
        return {shard.key: shard.size for shard in self.shards}


def version_key(version: int) -> str:
    """The object key of a version's document."""
    return f"versions/{version:08}.json"


def new_document(
    name: str,
    shards: tuple[Shard, ...],
    index: tuple[IndexPart, ...],
    *,
    version: int,
    parent: int | None,
    message: str,
    mounts: tuple[Mount, ...] = (),
) -> VersionDocument:
    """A document ready to be published, with a fresh nonce and today's date."""
    return VersionDocument(
        format=FORMAT,
        version=version,
        parent=parent,
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        nonce=secrets.token_hex(16),
        message=message,
        samples=sum(shard.samples for shard in shards),
        shards=shards,
        index=index,
        mounts=mounts,
    )


def encode(document: msgspec.Struct) -> bytes:
    """The document as it is stored: JSON for people too, with its own digest at the end."""
    data = seal.seal(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    if len(data) > limits.JSON_DOCUMENT_BYTES:
        raise CapacityError(
            f"the version's document would have {len(data)} bytes, above the limit of {limits.JSON_DOCUMENT_BYTES}",
            hint="use larger shards (shard_bytes=, --shard-size)",
        )
    return data


def list_versions(store: Store) -> list[int]:
    """The versions that exist, ascending."""
    matches = (_VERSION_KEY.fullmatch(info.key) for info in store.list("versions/"))
    return sorted(int(match[1]) for match in matches if match)


def claim(store: Store, name: str) -> None:
    """Write `dataset.json` unless a writer did before; what it says does not make a dataset visible."""
    store.put_if_absent(DATASET_KEY, encode(DatasetDocument(format=FORMAT, name=name, nonce=secrets.token_hex(16))))


def refuse_existing(store: Store) -> None:
    """`ConflictError` when the store already holds a dataset."""
    existing = list_versions(store)
    if existing:
        raise ConflictError(
            f"{store.location.url} already holds a dataset (version {existing[-1]})",
            hint="pack into an empty place; a stored version never changes",
        )


def publish(store: Store, document: VersionDocument) -> None:
    """Make the version exist, or raise `ConflictError` when another writer did."""
    if not store.put_if_absent(version_key(document.version), encode(document)):
        winner, _ = load(store, document.version)
        raise ConflictError(
            f"{store.location.url}: another writer made version {document.version}, "
            f"{winner.samples} samples at {winner.created}",
            hint="open that version, or pack into another place",
        )


def load(store: Store, version: int | None = None) -> tuple[VersionDocument, str]:
    """The document of `version` (None: the newest) and the BLAKE3 of its bytes."""
    url = store.location.url
    wanted = version
    if wanted is None:
        wanted = max(list_versions(store), default=None)
    if wanted is None:
        raise NotFoundError(f"there is no dataset at {url}", hint="check the address, or make one with `millrace pack`")
    try:
        data = store.get(version_key(wanted), max_bytes=limits.JSON_DOCUMENT_BYTES)
    except NotFoundError as error:
        existing = list_versions(store)
        if not existing:
            raise NotFoundError(f"there is no dataset at {url}", hint="check the address") from error
        raise NotFoundError(
            f"{url} has no version {wanted}", hint=f"it has {', '.join(map(str, existing[-20:]))}"
        ) from error
    return decode(data, wanted, f"{url}: {version_key(wanted)}"), digest(data)


def decode_dataset(data: bytes, name: str) -> DatasetDocument:
    """The checked `dataset.json`; `name` names it in errors."""
    _check_bytes(data, name)
    try:
        return msgspec.json.decode(data, type=DatasetDocument)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a dataset document: {error}") from error


class _Format(msgspec.Struct):
    format: int


def _check_bytes(data: bytes, name: str) -> None:
    if seal.is_sealed(data):
        seal.unseal(data, name)
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise UnsupportedError(f"{name} has format {found}; this Millrace reads {FORMAT}", hint="upgrade Millrace")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a version document or dataset.json: {error}") from error
    seal.unseal(data, name)


def decode(data: bytes, version: int, name: str) -> VersionDocument:
    """The checked document of `version`; `name` names it in errors."""
    _check_bytes(data, name)
    try:
        document = msgspec.json.decode(data, type=VersionDocument)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a version document: {error}") from error
    _check(document, version, name)
    return document


def _check(document: VersionDocument, version: int, name: str) -> None:
    sizes = [*(s.size for s in document.shards), *(p.size for p in document.index)]
    counts = [*(s.samples for s in document.shards), *(p.rows for p in document.index)]
    keys = [s.key for s in document.shards]
    consistent = (
        document.version == version
        and all(n >= 0 for n in sizes + counts)
        and document.samples == sum(s.samples for s in document.shards) == sum(p.rows for p in document.index)
        and keys == sorted(set(keys))
        and _mounts_agree(document, keys)
    )
    if not consistent:
        raise CorruptionError(f"{name} contradicts itself: version, counts or shards do not agree")


def _mounts_agree(document: VersionDocument, keys: list[str]) -> bool:
    """Whether every shard below `mounts/` names one of at most `MAX_MOUNTS` mounts."""
    names = [mount.name for mount in document.mounts]
    used = {key.split("/")[1] for key in keys if key.startswith(PREFIX)}
    return len(set(names)) == len(names) <= MAX_MOUNTS and used <= set(names)
