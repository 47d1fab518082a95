"""States, plans and saves without torch, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.checkpoint.format import chunking, manifest, names
from headrace.checkpoint.format.chunking import Box, TensorSpec, whole
from headrace.checkpoint.format.documents import Base, StepName
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import timeline
from headrace.checkpoint.repository.fetch import Step, open_step
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.saving import plan
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.plan import Event
from headrace.checkpoint.state import tree
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.limits import KIB, SMALL_OBJECT_BYTES
from headrace.dataio.store.base import Buffer, Location, ObjectInfo, Store

RUN = "exp"
State = Mapping[str, bytes]
"""Tensors of type uint8 by name."""


def tiny_state(seed: int, frozen: int = 0) -> dict[str, bytes]:
    """Two tensors with chunks of their own, one of which depends on `frozen` only, and two small ones."""
    new, old = np.random.default_rng(seed), np.random.default_rng(frozen)
    return {
        "frozen": old.bytes(160 * KIB),
        "weights": new.bytes(200 * KIB + 13),
        "step": new.bytes(4),
        "empty": b"",
    }


@dataclass(frozen=True)
class Made:
    """A staged state and its plan."""

    arena: memoryview
    plan: plan.PutPlan

    @property
    def encoded(self) -> bytes:
        return plan.encode(self.plan)


def make(
    store: Store,
    state: State | Sequence[tuple[str, Box, bytes]],
    *,
    step: int,
    number: int = 1,
    attempt: str | None = None,
    bases: tuple[Base, ...] = (),
    rank: int = 0,
    world_size: int = 1,
    boxes: Mapping[str, Box] | None = None,
    values: object = None,
    replicas: bytes = b"",
    run: str = RUN,
    **more: object,
) -> Made:
    """Stage `state` and plan its save. `boxes` makes a tensor a shard of a larger, replicated one; so do the boxes of a
    state that is a list of shards."""
    if isinstance(state, Mapping):
        rows = [(name, (boxes or {}).get(name), data) for name, data in state.items()]
    else:
        rows = [(name, box, data) for name, box, data in state]
    specs = [TensorSpec(name, "uint8", box or whole((len(data),)), box is not None) for name, box, data in rows]
    place = chunking.lay_out(specs)
    arena = bytearray(max(place.total, 1))
    for at, (_, _, data) in zip(place.offsets, rows, strict=True):
        arena[at : at + len(data)] = data
    refs = {name: tree.TensorRef(name) for name, _, _ in rows}
    planned = plan.PutPlan(
        location=plan.PlanLocation(store.location.url, dict(store.location.options)),
        run=run,
        timeline=number,
        step=step,
        attempt=attempt or names.new_id(),
        rank=rank,
        world_size=world_size,
        bases=bases,
        tensors=plan.plan_tensors(specs, place),
        small_bytes=place.small_bytes,
        tree=tree.encode({"tensors": refs, "values": values}),
        replicas=replicas,
        **more,  # type: ignore[arg-type]
    )
    return Made(memoryview(arena), planned)


def begin(store: Store, parent: Base | None = None, run: str = RUN) -> int:
    """What a trainer that starts does before its first save; the number of its timeline."""
    repository.ensure_repo(store)
    return timeline.open_timeline(store, run, StepName(parent.timeline, parent.step) if parent else None)


def save(store: Store, made: Made, emit: Callable[[Event], None] = lambda _: None, clock: Clock = SYSTEM_CLOCK) -> Base:
    """Carry it here; the committed step."""
    result = commit_staged(made.arena, made.plan, emit, store=store, clock=clock)
    assert result["attempt"] == made.plan.attempt
    return Base(made.plan.timeline, made.plan.step, made.plan.attempt)


class MemorySink:
    """A tensor's bytes in memory."""

    def __init__(self, size: int) -> None:
        self.data, self.closed = bytearray(size), False

    def open(self) -> memoryview:
        return memoryview(self.data)

    def close(self) -> None:
        self.closed = True


def load(store: Store, base: Base, rank: int = 0, run: str = RUN) -> dict[str, bytes]:
    """The step's tensors as `rank` sees them."""
    with chunk_reader.LeasedStep(store, run, base) as step:
        return whole_tensors(store, step, rank)


def whole_tensors(store: Store, step: Step, rank: int = 0) -> dict[str, bytes]:
    """All tensors of an open step as `rank` sees them."""
    found = chunk_reader.tensors_of(step, rank)
    sinks = {name: MemorySink(chunking.nbytes(saved.dtype, saved.shape)) for name, saved in found.items()}
    chunk_reader.read(
        store, step, [chunk_reader.Want(saved, whole(saved.shape), sinks[name]) for name, saved in found.items()]
    )
    assert all(sink.closed or not sink.data for sink in sinks.values())
    return {name: bytes(sink.data) for name, sink in sinks.items()}


def latest(store: Store) -> Base | None:
    return repository.find(store, RUN, "latest")


def manifest_of(store: Store, base: Base, rank: int = 0) -> manifest.Manifest:
    return open_step(store, RUN, base).manifests[rank]


class Wrapped(Store):
    """A store in front of another, for tests that make single operations misbehave."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def location(self) -> Location:
        return self.inner.location

    def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
        return self.inner.get(key, max_bytes=max_bytes)

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.inner.get_into(key, offset, buffer)

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.inner.get_ranges_into(key, ranges)

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self.inner.put_if_absent(key, data)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self.inner.put_multipart(key, parts)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        return self.inner.list_folders(prefix, after=after)

    def stat(self, key: str) -> ObjectInfo:
        return self.inner.stat(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        self.inner.delete_many(keys)


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a stored object; negative offsets count from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.chmod(0o644)
    path.write_bytes(data)
