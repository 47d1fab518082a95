"""The data that the saver and the commit worker exchange: the put plan, and the worker's events.

Invariant: a plan holds no secret and no tensor bytes. Plan and arena together are sufficient to commit the step. The
tensors of a plan lie inside the arena and do not overlap. After `Released` the worker never touches the arena again. At
most one of `Done` and `Failed` ends the events.
Failure behaviour: `decode` raises `UnsupportedError` for a newer version and `UsageError` for an invalid plan. From an
error's code, `as_error` rebuilds an error of the same class. From an unknown code, it builds a plain `HeadraceError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.checkpoint.format import chunking, codec, names
from headrace.checkpoint.format.chunking import Box, Layout, TensorSpec, lay_out, nbytes
from headrace.checkpoint.format.documents import VERSION, Base, newer
from headrace.checkpoint.format.metadata import Value, flaw_of
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Location

MAX_BYTES = 64 * MIB


class PlanLocation(msgspec.Struct, frozen=True):
    url: str
    options: dict[str, object]

    def to_location(self) -> Location:
        return Location(self.url, self.options, shareable=True)


class PlanTensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tensor shard at byte `at` of the arena."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    replicated: bool
    at: int

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, Box(self.shape, self.offset, self.local), self.replicated)


class OwnManifest(msgspec.Struct, frozen=True):
    """A rank's manifest of the last step that its process committed.

    `attempt`: the attempt that became the step. `digest`: the digest of the encoded manifest. `data`: the encoded
    manifest. If `data` is empty, the worker reads the manifest from the store.
    """

    attempt: str
    digest: bytes
    data: bytes = b""


class PutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker needs to commit one rank's part of a step, except the tensor bytes.

    `upload_hint`: bytes per second that an earlier save measured; 0 if unknown. `tree` and `replicas` are copied into
    the manifest. `own_manifest`: None if the trainer's process has not committed a step, or if its last save failed.
    `metadata` and `description` (the digest of the description) are copied into the manifest; only rank 0 has them.
    `description_data`: the description, if this process has not stored it yet.
    Times are in seconds.
    """

    version: int = VERSION
    location: PlanLocation
    run: str
    timeline: int
    step: int
    attempt: str
    rank: int
    world_size: int
    bases: tuple[Base, ...]
    tensors: tuple[PlanTensor, ...]
    small_bytes: int
    tree: bytes
    replicas: bytes
    compression: str = "none"
    upload_hint: float = 0.0
    lease_seconds: float = 300.0
    commit_timeout: float = 600.0
    own_manifest: OwnManifest | None = None
    metadata: dict[str, Value] = {}
    description: str = ""
    description_data: bytes = b""

    @property
    def bytes_state(self) -> int:
        return sum(nbytes(tensor.dtype, tensor.local) for tensor in self.tensors)


class _Head(msgspec.Struct):
    version: int


def plan_tensors(specs: Sequence[TensorSpec], layout: Layout) -> tuple[PlanTensor, ...]:
    """The plan's rows for these tensors and their layout."""
    rows = zip(specs, layout.offsets, strict=True)
    return tuple(
        PlanTensor(s.name, s.dtype, s.box.shape, s.box.offset, s.box.local, s.replicated, at) for s, at in rows
    )


def encode(plan: PutPlan) -> bytes:
    """Encode the plan; `UsageError` if the state has too many tensors for one plan."""
    data = msgspec.msgpack.encode(plan)
    if len(data) > MAX_BYTES and plan.own_manifest is not None:  # the worker can read it
        without_data = msgspec.structs.replace(plan.own_manifest, data=b"")
        data = msgspec.msgpack.encode(msgspec.structs.replace(plan, own_manifest=without_data))
    if len(data) > MAX_BYTES:
        raise UsageError(f"the plan of step {plan.step} has {len(data)} bytes, more than {MAX_BYTES}")
    return data


def decode(data: bytes, arena_bytes: int) -> PutPlan:
    """Decode a plan and check it against an arena of `arena_bytes` bytes."""
    try:
        version = msgspec.msgpack.decode(data, type=_Head).version
        if version != VERSION:
            raise newer("the put plan", version)
        plan = msgspec.msgpack.decode(data, type=PutPlan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the put plan cannot be read: {error}") from None
    _check(plan, arena_bytes)
    return plan


def _check(plan: PutPlan, arena_bytes: int) -> None:
    names.check_run(plan.run)
    names.check_step(plan.step)
    names.check_id(plan.attempt)
    if not 0 <= plan.rank < plan.world_size or plan.compression not in codec.COMPRESSIONS or plan.lease_seconds <= 0:
        raise UsageError("the put plan's rank, compression or lease is impossible")
    if flaw := flaw_of(plan.metadata, plan.description):
        raise UsageError(f"the put plan is impossible: {flaw}")
    try:
        specs = [tensor.spec() for tensor in plan.tensors]
        types_known = all(spec.dtype in chunking.ITEM_BYTES for spec in specs)
        layout = lay_out(specs) if types_known else None
    except CorruptionError as error:
        raise UsageError(f"the put plan is impossible: {error}") from None
    if layout is None or layout.small_bytes != plan.small_bytes or layout.total > arena_bytes:
        raise UsageError("the put plan's layout does not fit its tensors or the arena")
    if layout.offsets != tuple(tensor.at for tensor in plan.tensors):
        raise UsageError("the put plan's offsets do not match its layout")


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of state that are stored or deduplicated, of the total."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Released:
    """The worker no longer needs the arena."""


@dataclass(frozen=True, slots=True)
class Committing:
    """This rank's manifest is written. Only waiting for other ranks and small writes are left."""


@dataclass(frozen=True, slots=True)
class Done:
    """The step is committed."""

    result: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Failed:
    """This worker did not commit the step. `again`: the same plan may be tried again."""

    code: str
    message: str
    hint: str
    again: bool = False


Event = Progress | Released | Committing | Done | Failed


def to_json(event: Event) -> str:
    """The event as one line of JSON, without the newline."""
    name = type(event).__name__.lower()
    return json.dumps({"event": name} | {key: getattr(event, key) for key in event.__slots__})


def failed(error: HeadraceError, *, again: bool = False) -> Failed:
    return Failed(error.code, error.message, error.hint, again)


def as_error(code: str, message: str, hint: str) -> HeadraceError:
    """The error that a worker in another process reported."""
    return _classes(HeadraceError).get(code, HeadraceError)(message, hint=hint)


def _classes(kind: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    by_code = {kind.code: kind}
    for child in kind.__subclasses__():
        by_code |= {code: c for code, c in _classes(child).items() if code not in by_code}
    return by_code
