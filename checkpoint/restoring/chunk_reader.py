"""Read the tensor bytes of a committed step into the caller's memory.

Invariant: the shards of every request hold all of it, or an error is raised before the first read. `read` returns after
every byte was checked against its chunk's digest. A raw chunk whose bytes go to one contiguous range of memory is read
directly into it. A lease protects the step while it is read. After the lease is written, the step is looked up again.
Garbage collection therefore cannot remove it during the read.

Failure behaviour: `CorruptionError` names step, tensor, pack and offset. Tensors that were complete before the error
have changed. The damaged tensor holds a mixture of old and new bytes, with zeros in place of the damage. The caller
must restore another step or stop.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, runtime_checkable

import msgspec

from headrace.checkpoint import sharding
from headrace.checkpoint.format import chunking, names
from headrace.checkpoint.format.chunking import SMALL_BELOW, Box
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Chunk, Manifest, Rows, Tensor
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import Step, open_step
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError, NotFoundError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.base import Store

_log = get_logger(__name__)


class Sink(Protocol):
    """Memory for one tensor."""

    def open(self) -> memoryview:
        """Return writable memory for exactly the tensor's bytes, row-major.

        The reader calls it once, before it reads the first byte.
        """
        ...

    def close(self) -> None:
        """Finish the tensor. The reader calls it once, after all bytes are written."""
        ...


@runtime_checkable
class ReadsDirectly(Protocol):
    """A store that can fill some memory by itself, such as GPU memory by GPUDirect Storage."""

    def read_directly(
        self, reading: ChunkReader, chunks: Iterable[tuple[str, NeededChunk]]
    ) -> list[tuple[str, NeededChunk]]:
        """Read, check and use the chunks that this store can read by itself. Return the others."""
        ...


class Saved(msgspec.Struct, frozen=True, gc=False):
    """A global tensor of a step as one rank sees it.

    `shards`: its shards, each with the tables of the manifest that lists it. Shards that the rank does not need may be
    left out. `alone`: no other rank needs any of these shards.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[tuple[Rows, Tensor], ...]
    alone: bool = False


class Want(msgspec.Struct, frozen=True, gc=False):
    """A request for the elements `box` of a saved tensor. The sink receives them."""

    saved: Saved
    box: Box
    sink: Sink

    @property
    def name(self) -> str:
        return self.saved.name


class ChunkUse(msgspec.Struct, gc=False):
    """The part of a chunk that one request needs: `length` bytes from byte `start`.

    In `shard`, these bytes begin at byte `at`.
    """

    want: int
    shard: Box
    at: int
    start: int
    length: int


class NeededChunk(msgspec.Struct, gc=False, eq=False):
    """A chunk to read, with all its uses, in the form that `fetch` accepts.

    `direct`: the use into whose memory the chunk is read.
    """

    chunk: Chunk
    uses: list[ChunkUse] = msgspec.field(default_factory=list)
    direct: ChunkUse | None = None

    @property
    def digest(self) -> bytes:
        return self.chunk.digest

    @property
    def offset(self) -> int:
        return self.chunk.offset

    @property
    def stored(self) -> int:
        return self.chunk.stored

    @property
    def raw(self) -> int:
        return self.chunk.raw

    @property
    def codec(self) -> int:
        return self.chunk.codec


def tensors_of(step: Step, rank: int) -> dict[str, Saved]:
    """Every tensor that `rank` sees, by name: its rank-local tensors and all replicated ones.

    If the step was saved by fewer ranks, a rank beyond them sees the rank-local tensors of rank 0.
    """
    own_manifest = step.manifests[rank if rank < len(step.manifests) else 0]
    shared: dict[str, list[tuple[Rows, Tensor]]] = defaultdict(list)
    for manifest in step.manifests:
        for tensor in manifest.tensors:
            if tensor.replicated:
                shared[tensor.name].append((manifest, tensor))
    replicated = {name: Saved(name, ts[0][1].dtype, ts[0][1].shape, tuple(ts)) for name, ts in shared.items()}
    return replicated | own_tensors(own_manifest)


def own_tensors(manifest: Manifest, alone: bool = False) -> dict[str, Saved]:
    """The rank-local tensors of a manifest, by name. `alone`: no other rank reads them."""
    return {
        t.name: Saved(t.name, t.dtype, t.shape, ((manifest, t),), alone) for t in manifest.tensors if not t.replicated
    }


class StepLease(contextlib.AbstractContextManager[None]):
    """A context manager that holds a lease on a step, and looks the step up after the lease is written.

    If the object is garbage-collected, the lease is released too. `writes`: False if another rank of the job holds the
    lease. `published_by`: see `repository.require_exists`. An error of the block is replaced if its reason is that
    retention has removed the step.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        base: Base,
        clock: Clock = SYSTEM_CLOCK,
        *,
        writes: bool = True,
        published_by: str = "",
    ) -> None:
        self._store, self._run, self._base, self._clock, self._writes = store, run, base, clock, writes
        self._published_by = published_by
        self._stack = contextlib.ExitStack()
        self._close = Finalizer(self, self._stack.close)

    def __enter__(self) -> None:
        if not self._writes:
            return
        try:
            self._lease()
            repository.require_exists(self._store, self._run, self._base, published_by=self._published_by)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            missing = isinstance(error, (CorruptionError, NotFoundError))
            if missing and repository.is_removed(self._store, self._run, self._base):
                raise repository.removed(
                    self._run, self._base.step
                ) from error  # retention assumed that this reader had died
        finally:
            self._close()

    def _lease(self) -> None:
        lease = LeaseKeeper(
            self._store,
            names.new_id(self._clock),
            run=self._run,
            timeline=self._base.timeline,
            step=self._base.step,
            bases=[self._base],
            clock=self._clock,
        )
        try:
            self._stack.enter_context(lease)
            self._stack.callback(lease.release)
        except AccessDeniedError:
            warn_once(_log, f"{self._store.location.url} may not be written to: reading without a lease", "job")


class LeasedStep(contextlib.AbstractContextManager[Step]):
    """A context manager that opens a step, with all its manifests, and holds a lease on it.

    `published_by`: see `repository.require_exists`.
    """

    def __init__(
        self, store: Store, run: str, base: Base, clock: Clock = SYSTEM_CLOCK, *, published_by: str = ""
    ) -> None:
        self._store, self._run, self._base = store, run, base
        self._stack = contextlib.ExitStack()
        self._lease = StepLease(store, run, base, clock, published_by=published_by)

    def __enter__(self) -> Step:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lease)
            opened = open_step(self._store, self._run, self._base)
            self._stack = stack.pop_all()
        return opened

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)


def read(store: Store, step: Step, wants: Sequence[Want]) -> None:
    """Fill the sinks of all `wants`."""
    reading = ChunkReader(step, wants)
    reading.fetch(store, reading.needed())


def _uses(number: int, want: Want) -> Iterator[tuple[str, Chunk, ChunkUse]]:
    """Every chunk that holds requested bytes, with the key of its pack."""
    item, common_elements = chunking.ITEM_BYTES[want.saved.dtype], 0
    for manifest, tensor in want.saved.shards:
        box = tensor.box
        same = box == want.box
        if not (common := math.prod(box.local) if same else box.common(want.box)):
            continue
        common_elements += common
        at = 0
        for span in tensor.spans:
            if same or sharding.overlaps(box, want.box, item, at, span.length):
                chunk = manifest.chunks[span.chunk]
                yield manifest.packs[chunk.pack].key, chunk, ChunkUse(number, box, at, span.start, span.length)
            at += span.length
    if common_elements != (elements := math.prod(want.box.local)):
        raise CorruptionError(
            f"tensor {want.name!r:.200}: its shards hold {common_elements} of the {elements} elements to read"
        )


class ChunkReader:
    """Reads the chunks that some requests need, and copies them into the sinks.

    Each sink is opened before its first byte and closed after its last.
    """

    def __init__(self, step: Step, wants: Sequence[Want]) -> None:
        self._step, self.wants = step, wants
        self._uses = [0] * len(wants)
        self._open: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._needed: dict[str, dict[int, NeededChunk]] = defaultdict(dict)
        for number, want in enumerate(wants):
            for key, chunk, use in _uses(number, want):
                chunks = self._needed[key]
                if (needed := chunks.get(chunk.offset)) is None:
                    needed = chunks[chunk.offset] = NeededChunk(chunk)
                needed.uses.append(use)
                self._uses[number] += 1
        self._remaining = list(self._uses)

    def needed(self) -> list[tuple[str, NeededChunk]]:
        """All chunks, each with the key of its pack."""
        return [(key, chunk) for key in sorted(self._needed) for chunk in self._needed[key].values()]

    def batches(self, chunks: Iterable[tuple[str, NeededChunk]]) -> Iterator[fetch.Batch[NeededChunk]]:
        """These chunks in batches, in the form that `fetch` accepts."""
        by_pack: dict[str, list[NeededChunk]] = defaultdict(list)
        for key, chunk in chunks:
            by_pack[key].append(chunk)
        return (batch for key in sorted(by_pack) for batch in fetch.batches(key, by_pack[key]))

    def fetch(self, store: Store, chunks: Iterable[tuple[str, NeededChunk]], workers: int = fetch.THREADS) -> None:
        """Read these chunks and copy them into the sinks."""
        remaining = store.read_directly(self, chunks) if isinstance(store, ReadsDirectly) else chunks
        fetch.fetch(store, self.batches(remaining), self.use, self.direct_memory, workers)

    def direct_memory(self, pack: str, needed: NeededChunk) -> memoryview | None:
        """The memory to read a chunk into directly, if one use takes the whole chunk contiguously. Otherwise None."""
        for use in needed.uses:
            if use.length == needed.raw:
                want = self.wants[use.want]
                item = chunking.ITEM_BYTES[want.saved.dtype]
                at = sharding.offset_in(use.shard, want.box, item, use.at, use.length)
                if at is not None:
                    needed.direct = use
                    return self._target(use.want)[at : at + use.length]
        return None

    def use(self, pack: str, needed: NeededChunk, payload: memoryview | None) -> None:
        """Copy a chunk's bytes to its uses, except the use into whose memory it was read.

        `payload` is None for a damaged chunk.
        """
        if payload is None:
            if (damaged_part := self.direct_memory(pack, needed) if needed.direct else None) is not None:
                damaged_part[:] = bytes(len(damaged_part))
            raise self.damaged(pack, needed)
        for use in needed.uses:
            if use is not needed.direct:
                self.put(use, payload)
        if needed.direct is not None:
            self.done(needed.direct.want)  # last: the other uses are copied from there

    def remaining(self, want: int) -> int:
        """The number of chunk uses that a request still waits for."""
        return self._remaining[want]

    def put(self, use: ChunkUse, payload: memoryview) -> None:
        """Copy the part of a chunk that one use needs."""
        want, part = self.wants[use.want], payload[use.start : use.start + use.length]
        if use.length < SMALL_BELOW and use.shard == want.box:
            self._put_small(use, want.sink, part)
            return
        sharding.copy_overlap(
            use.shard, want.box, chunking.ITEM_BYTES[want.saved.dtype], use.at, part, self._target(use.want)
        )
        self.done(use.want)

    def _put_small(self, use: ChunkUse, sink: Sink, part: memoryview) -> None:
        """Copy a part of a shard that is requested whole.

        A thread must hold the GIL for the copy anyway, so a sink that has no other use is not registered as open.
        """
        if self._uses[use.want] > 1:
            self._target(use.want)[use.at : use.at + use.length] = part
            self.done(use.want)
            return
        sink.open()[:] = part
        self._remaining[use.want] = 0
        sink.close()

    def _target(self, want: int) -> memoryview:
        with self._lock:
            if want not in self._open:
                self._open[want] = self.wants[want].sink.open()
            return self._open[want]

    def done(self, want: int) -> None:
        """Count one use of a request as done. After the last use, close the sink."""
        with self._lock:
            self._remaining[want] -= 1
            if self._remaining[want]:
                return
            self._open.pop(want, None)
        self.wants[want].sink.close()

    def damaged(self, pack: str, needed: NeededChunk) -> CorruptionError:
        """The error for a damaged chunk."""
        base, names_hit = self._step.base, sorted({self.wants[use.want].name for use in needed.uses})
        more = f" and {len(names_hit) - 1} more" if len(names_hit) > 1 else ""
        return CorruptionError(
            f"step {base.step} of run {self._step.run} is damaged: tensor {names_hit[0]!r:.200}{more}, "
            f"{needed.stored} bytes at offset {needed.offset} of {pack}",
            hint="restore an earlier step; `headrace ckpt check` lists what else is damaged",
        )
