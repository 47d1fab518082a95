"""The repository's small JSON documents.

They are: repo, timeline, lease, decision (the object `fate`), COMMIT, and the records in `gc/`.
Invariant: every document contains a version, a nonce and, as its last entry, its own digest
(`headrace.dataio.core.json`; documents of older versions have none). No document holds a secret. A reader checks the
version first. It ignores unknown fields, so documents with additional fields stay readable.
Failure behaviour: `UnsupportedError` for a newer version; `CorruptionError` naming the object for an unreadable
document.
"""

from __future__ import annotations

import os
import socket
from typing import Annotated, ClassVar, TypeVar

import msgspec

from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format import names
from headrace.checkpoint.format.metadata import JsonValue, Metadata, from_json, given, stall_of
from headrace.dataio.core import json
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.limits import JSON_DOCUMENT_BYTES
from headrace.dataio.store.base import Store

VERSION = 1
_READS = 3
"""The number of times that a document is fetched before it counts as damaged."""
FORMAT_SUFFIX = "-checkpoint"
"""The end of a repository's format name.

The text before it is the name that the software had when it created the repository. Readers accept any name.
"""
MOST_ATTEMPTS = 4096
"""The maximum number of attempts in `Totals`. It bounds the size of a decision."""
FORMAT = f"headrace{FORMAT_SUFFIX}"
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number of bytes or of objects. JSON could express numbers that are too large for a float."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all documents. `newest`: the newest version of this kind that this Headrace reads."""

    newest: ClassVar[int] = VERSION
    version: int = VERSION
    nonce: str = msgspec.field(default_factory=names.new_id)


class StepName(msgspec.Struct, frozen=True, order=True):
    """One step of one timeline."""

    timeline: int
    step: int


class Base(msgspec.Struct, frozen=True, omit_defaults=True):
    """A committed attempt that another attempt references.

    `run`: its run; "" for the run of the document that names it.
    """

    timeline: int
    step: int
    attempt: str
    run: str = ""

    def of(self, run: str) -> StepOfRun:
        """The step of this attempt; `run` is the run of the document that names it."""
        return StepOfRun(self.run or run, self.timeline, self.step)


class Repo(Document, frozen=True, kw_only=True):
    format: str = FORMAT
    id: str
    created: float


class ProcessName(msgspec.Struct, frozen=True):
    """The process that wrote a document, for error messages."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Timeline(Document, frozen=True, kw_only=True):
    """One timeline of a run. `writer`: name of the writer that opened it (`headrace.checkpoint.repository.writers`).

    `writer` is "" in documents of older versions.
    """

    run: str
    timeline: int
    parent: StepName | None
    created: float
    process: ProcessName = msgspec.field(name="who")
    writer: str = ""


class Newest(Document, frozen=True, kw_only=True):
    """A recent step of a timeline. A search for the latest step begins there. The object may be old or missing."""

    step: int


class Lease(Document, frozen=True, kw_only=True):
    """A lease on an attempt. `until`: when it expires, in seconds since the epoch. `life`: its lifetime in seconds.

    A collection must not remove `bases` while the lease is alive. A lease that references another run has version 2. A
    collector that supports only bases in the lease's own run therefore refuses it.
    """

    newest: ClassVar[int] = 2
    attempt: str
    run: str
    timeline: int
    step: int
    bases: tuple[Base, ...]
    until: float
    life: float = 300.0
    process: ProcessName = msgspec.field(name="who")


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the manifests of a complete attempt. With them, listings and collections need not read manifests.

    `tensors`: number of shards of tensors. `packs`: number of the attempt's own packs that its manifests name.
    `attempts`: the other attempts whose packs the manifests name. Sizes are in bytes.
    """

    ranks: Count
    tensors: Count
    packs: Count
    attempts: tuple[str, ...]
    bytes_state: Count
    bytes_written: Count
    bytes_deduplicated: Count


class Decision(Document, frozen=True, kw_only=True):
    """`outcome`: "commit" or "abort". `manifests`: the hexadecimal BLAKE3 digests of the ranks' manifests, by rank.

    The decision of a job of more than `names.GROUP_RANKS` ranks has version 2. It names the digests of the groups
    (`headrace.checkpoint.format.group`) instead, the world size, and the number of ranks in a group.

    `totals` is None in documents of older versions, and if the attempt names packs of more than `MOST_ATTEMPTS` other
    attempts.

    `metadata`: the step's metadata, in its JSON form. `description`: the digest of the step's description; "" if it has
    none. Both are copied from rank 0's manifest, and are empty in documents of older versions.
    """

    newest: ClassVar[int] = 2
    attempt: str
    outcome: str = msgspec.field(name="fate")
    manifests: tuple[str, ...] = ()
    reason: str = ""
    groups: tuple[str, ...] = ()
    world_size: int = 0
    group_ranks: int = 0
    totals: Totals | None = None
    metadata: dict[str, JsonValue] = {}
    description: str = ""

    def __post_init__(self) -> None:
        if step_metadata.has_huge_integers(self.metadata):
            raise ValueError("its metadata has an integer of more than 64 bits")

    def values(self) -> Metadata:
        """The step's metadata, as the user gave it."""
        return given(from_json(self.metadata))

    def stall(self) -> float | None:
        """Seconds for which `save` blocked rank 0; None if they were not recorded."""
        return stall_of(from_json(self.metadata))


class Commit(Document, frozen=True, kw_only=True):
    """Names the attempt that is the step. With `tombstone`, the step was removed and can never be saved again."""

    step: int
    attempt: str = ""
    tombstone: bool = False
    committed: float = 0.0

    def commits(self, attempt: str) -> bool:
        """Whether the step exists and is this attempt."""
        return self.attempt == attempt and not self.tombstone


class StepOfRun(msgspec.Struct, frozen=True):
    run: str
    timeline: int
    step: int


class Best(msgspec.Struct, frozen=True):
    """A rule of a policy: keep the `count` steps with the lowest (`order` "min") or highest ("max") value of `name`."""

    name: str
    count: int
    order: str


class Policy(msgspec.Struct, frozen=True):
    """A retention policy as stored in a record; see `headrace.checkpoint.repository.retention.Keep`.

    Older versions ignore `best`.
    """

    last: int | None = None
    every: int | None = None
    tags: tuple[str, ...] = ("*",)
    best: tuple[Best, ...] = ()


class PendingDelete(Document, frozen=True, kw_only=True):
    """Steps that a collector is about to remove.

    The collector applies `policy` again before the removal. None: it removes the steps unconditionally.
    """

    steps: tuple[StepOfRun, ...]
    policy: Policy | None = None


class _Head(msgspec.Struct):
    version: int


D = TypeVar("D", bound=Document)


def encode(document: Document) -> bytes:
    """Encode as indented JSON with its digest and a final newline."""
    return json.seal(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def decode(data: bytes, kind: type[D], key: str) -> D:
    """The document of type `kind` that the object `key` holds."""
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if VERSION <= version <= kind.newest:
            return msgspec.json.decode(json.unseal(data, key) if json.is_sealed(data) else data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{key} is not a readable document: {error}", hint="run `headrace ckpt check`") from None
    raise newer(key, version, kind.newest)


def newer(key: str, version: int, newest: int = VERSION) -> UnsupportedError:
    """The error for an object of a version that this Headrace does not know. It reads versions up to `newest`."""
    supported = f"version {VERSION}" if newest == VERSION else f"versions {VERSION} to {newest}"
    return UnsupportedError(
        f"{key} has format version {version}; this Headrace reads {supported}", hint="install a newer Headrace"
    )


def read(store: Store, key: str, kind: type[D]) -> D:
    """Fetch and decode a document; `NotFoundError` if the object is absent.

    A damaged document is fetched up to `_READS` times, because the damage may have happened in transit.
    """
    for _ in range(_READS - 1):
        try:
            return decode(store.get(key, max_bytes=JSON_DOCUMENT_BYTES), kind, key)
        except (CorruptionError, UnsupportedError):
            store.invalidate(key)
    return decode(store.get(key, max_bytes=JSON_DOCUMENT_BYTES), kind, key)


def this_process() -> ProcessName:
    """The host name and pid of this process."""
    return ProcessName(socket.gethostname(), os.getpid())
