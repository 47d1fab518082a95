"""Compares the blocks of a new version with those of the version before, and encodes what changed.

Purpose: `Comparison` takes the new blocks from the staging memory of the save, or from the step, and the old ones from
`Held`, or from their step.
Invariants:

- An old block that does not have its digest is not used. A new block that comes from staging memory is part of a chunk
  that has the digest of the step (`staged`).
- A thread reads each block of main memory once: it hashes, compares, encodes and keeps it while it is in the caches.
- `Held` has the weights of one version, or of none: a comparison replaces them block by block, and `keep` names them.

Failure behaviour: `CorruptionError` if the version before cannot be read, or if staging memory does not hold the step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import numpy as np

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.difference import WHOLE, Bytes, encode
from headrace.checkpoint.publishing.records import Published, Stored
from headrace.checkpoint.publishing.source import Choice, PublishedTensor, blocks_of, published_tensors
from headrace.checkpoint.publishing.staged import StagedMemoryError
from headrace.checkpoint.publishing.updates import EncodedBlock, store_update
from headrace.checkpoint.publishing.weights import BLOCK_BYTES, TensorBlocks, Weights, load_weights
from headrace.checkpoint.repository.fetch import in_order
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.checkpoint.saving.copy_threads import num_copy_threads
from headrace.checkpoint.state.tensors import name_of
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UsageError
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

HELD_BYTES = 4 * GIB
"""Weights up to this size stay in a publisher's memory until the next version. Larger ones are read again."""
_MOST_THREADS = 4
_WORTH = 0.9
"""An update that is not below this fraction of the changed blocks is deleted: the step serves as well."""
_log = get_logger(__name__)


class Held:
    """The weights of the newest version that this process published, in memory.

    Args:
        limit (int): weights of more bytes are not kept. Default: `HELD_BYTES`.
    """

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self.limit = limit
        self._version: tuple[str, int] | None = None
        self._tensors: dict[str, Bytes] = {}

    def of(self, record: Published | None) -> Mapping[str, Bytes]:
        """The bytes of the tensors of a version by name; empty if they are not held."""
        return (
            self._tensors if record and self._version == (record.attempt + record.weights.digest, record.number) else {}
        )

    def replace(self, sizes: Mapping[str, int]) -> dict[str, Bytes]:
        """Memory for tensors of these sizes, which holds the old bytes where a size is the same. No version is held now."""
        self._version, old = None, self._tensors
        if sum(sizes.values()) > self.limit:
            sizes = {}
        self._tensors = {
            name: old[name] if name in old and len(old[name]) == size else np.empty(size, np.uint8)
            for name, size in sizes.items()
        }
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return sum(len(tensor) for tensor in self._tensors.values())

    def keep(self, record: Published) -> None:
        """The memory holds this version."""
        self._version = (record.attempt + record.weights.digest, record.number)


class OldVersion:
    """A context manager that gives access to the blocks of the version before, in memory or in its step."""

    def __init__(self, store: Store, record: Published, held: Held, clock: Clock) -> None:
        self._store, self._record, self._clock = store, record, clock
        self._held, self._stack = held.of(record), ExitStack()
        self._tensors: dict[str, PublishedTensor] = {}
        self.weights = Weights(())

    def __enter__(self) -> OldVersion:
        record = self._record
        with ExitStack() as stack:
            self.weights = load_weights(self._store, record)
            if not self._held:
                leased = chunk_reader.LeasedStep(self._store, record.run, record.base, self._clock)
                step = SavedStep(self._store, stack.enter_context(leased), 0)
                choice = Choice(record.include, record.exclude, record.dtype)
                self._tensors = {tensor.name: tensor for tensor in published_tensors(step, choice)[1]}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def blocks(self, names: Sequence[str]) -> Iterator[Bytes]:
        """The blocks of these tensors, one after the other."""
        if self._held:
            return (block for name in names if name in self._held for block in _cut(self._held[name]))
        missing = [name for name in names if name not in self._tensors]
        if missing:
            raise CorruptionError(f"step {self._record.step} has no tensor {missing[0]!r:.200}")
        return (block for _, block in blocks_of([self._tensors[name] for name in names]))


@dataclass(frozen=True, slots=True)
class _Task:
    """A block to compare.

    Args:
        tensor: its number among the new tensors. `source`: the tensor.
        block: its number in the tensor.
        new: its bytes; None if they are in staging memory.
        old, old_digest: the bytes of the version before, and their digest there; None and b"" if there are none.
        kept: where to keep the new bytes, which may be the memory of `old`.
    """

    tensor: int
    source: PublishedTensor
    block: int
    new: Bytes | None
    old: Bytes | None
    old_digest: bytes
    kept: Bytes | None
    item: int


class Comparison:
    """Compares the new version with the old one in one pass over both.

    Attributes:
        nbytes: bytes of all tensors.
        changed_bytes: bytes of the blocks that changed.
        stored_bytes: bytes of these blocks in the update.
    """

    def __init__(self, tensors: Sequence[PublishedTensor], old: OldVersion | None, held: Held) -> None:
        self._tensors, self._old = tensors, old
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.changed_bytes = self.stored_bytes = 0
        self._digests: list[list[bytes]] = [[] for _ in tensors]
        self._kept = held.replace({tensor.name: tensor.nbytes for tensor in tensors})

    def changes(self) -> Generator[EncodedBlock]:
        """Yield the changed blocks, encoded. Threads compare the next blocks meanwhile."""
        threads = min(num_copy_threads(), _MOST_THREADS)
        with ThreadPoolExecutor(threads, "headrace-publish") as pool:
            for number, block, digest_, encoded in in_order(pool, _compare, self._tasks(), 8 * threads):
                self._digests[number].append(digest_)
                if encoded is not None:
                    how, data, size = encoded
                    self.changed_bytes += size
                    self.stored_bytes += len(data)
                    yield number, block, how, data

    def only_digests(self) -> None:
        """Compute the digests of all blocks, without a version to compare with."""
        for _ in self.changes():
            pass

    def weights(self) -> Weights:
        """The table of the new version."""
        entries = zip(self._tensors, self._digests, strict=True)
        return Weights(tuple(TensorBlocks(t.name, name_of(t.dtype), tuple(t.shape), b"".join(d)) for t, d in entries))

    def _tasks(self) -> Iterator[_Task]:
        forms = [TensorBlocks(t.name, name_of(t.dtype), tuple(t.shape), b"") for t in self._tensors]
        before = [self._old_form(form) for form in forms]
        old_blocks = self._old.blocks([old.name for old in before if old]) if self._old else iter(())
        for number, block, new in self._new_blocks():
            form, old = forms[number], before[number]
            start, kept = block * BLOCK_BYTES, self._kept.get(form.name)
            yield _Task(
                number,
                self._tensors[number],
                block,
                new,
                next(old_blocks, None) if old else None,  # a damaged version may have fewer than its table says
                old.digest_of(block) if old else b"",
                kept[start : start + form.size_of(block)] if kept is not None else None,
                form.item,
            )

    def _new_blocks(self) -> Iterator[tuple[int, int, Bytes | None]]:
        """Yield tensor, block and bytes of each new block, in order; None for the bytes of those in staging memory."""
        of_step = blocks_of([tensor for tensor in self._tensors if tensor.staged is None])
        for number, tensor in enumerate(self._tensors):
            for block in range(-(-tensor.nbytes // BLOCK_BYTES)):
                yield number, block, next(of_step)[1] if tensor.staged is None else None

    def _old_form(self, form: TensorBlocks) -> TensorBlocks | None:
        """The old tensor of this name, if it has the same dtype and shape."""
        old = self._old.weights.by_name.get(form.name) if self._old else None
        return old if old and old.same_form(form) else None


_Compared = tuple[int, int, bytes, tuple[int, bytes, int] | None]
"""Tensor, block, digest, and, if the block changed, how it is stored, its stored bytes and its size."""


def _compare(task: _Task) -> _Compared:
    if task.new is not None:
        return _compare_bytes(task, task.new)
    with task.source.staged_block(task.block) as staged:
        if staged is not None:
            return _compare_bytes(task, *staged)
    if task.source.is_saved:
        [(_, new)] = task.source.read_blocks([task.block])
        return _compare_bytes(task, new)
    raise StagedMemoryError(f"the next save took the staging memory while {task.source.name!r:.200} was compared")


def _compare_bytes(task: _Task, new: Bytes, known: bytes = b"") -> _Compared:
    new_digest, encoded = known or digest(new.data), None
    if new_digest != task.old_digest:
        if task.old is None or digest(task.old.data) != task.old_digest:
            encoded = WHOLE, new.tobytes(), len(new)
        else:
            encoded = *encode(new, task.old, task.item), len(new)
    if task.kept is not None:
        np.copyto(task.kept, new)
    return task.tensor, task.block, new_digest, encoded


def _cut(data: Bytes) -> Iterator[Bytes]:
    return (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))


def discard_update(store: Store, name: str, update: Stored | None) -> None:
    """Delete an update that no record names. If that fails, a later publisher deletes it."""
    if update is not None:
        with suppress(HeadraceError):
            store.delete_many([f"{records.folder(name)}{update.key}"])


def compare(
    store: Store, name: str, tensors: Sequence[PublishedTensor], before: Published | None, held: Held, clock: Clock
) -> tuple[Comparison, Stored | None]:
    """Compare tensors with the version before, and store the update. Without one if that version cannot be read."""
    if before is not None:
        try:
            with OldVersion(store, before, held, clock) as old:
                comparison = Comparison(tensors, old, held)
                with closing(comparison.changes()) as changes:  # also after an error, which may outlive this call
                    update = store_update(store, name, changes, clock)
            if comparison.stored_bytes <= _WORTH * comparison.changed_bytes:
                return comparison, update
            discard_update(store, name, update)
            return comparison, None
        except StagedMemoryError:
            raise
        except (UsageError, CorruptionError) as error:
            _log.warning(
                "version %s of %s cannot be read, so the next version has no update: %s", before.number, name, error
            )
    comparison = Comparison(tensors, None, held)
    comparison.only_digests()
    return comparison, None
