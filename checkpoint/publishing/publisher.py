"""Publishes a committed step as the next version of a name.

Purpose: `publish` reads the selected tensors of a step, compares them with those of the version before, and writes the
table of their blocks, the update, and last the record, which makes the version visible.

Invariants:

- A record names a committed step. A tag keeps the step from the time before the record is written.
- The update leads from the version before to this one, block by block.
- Memory: one piece of a tensor of each version and a few blocks, and the weights of the newest version if `Held` keeps
  them.

Failure behaviour: `ConflictError` if another process published the next version first, or if the name belongs to
another run. A publisher that dies leaves the version before. A version before that cannot be read makes a version without an
update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Base, this_process
from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.difference import WHOLE, Bytes, encode
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice, PublishedTensor, blocks_of, published_tensors
from headrace.checkpoint.publishing.updates import EncodedBlock, store_update
from headrace.checkpoint.publishing.weights import TensorBlocks, Weights, load_weights, store_weights
from headrace.checkpoint.repository import tag_records, tags
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.checkpoint.state.tensors import name_of
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, NotFoundError
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

HELD_BYTES = 4 * GIB
"""Weights up to this size stay in a publisher's memory until the next version. Larger ones are read again."""
_THREADS = 2
_WORTH = 0.9
"""An update that is not below this fraction of the changed blocks is deleted: the step serves as well."""
_log = get_logger(__name__)

_after_tag = declare("publish.tagged", "a tag keeps the step, and nothing else was written")
_after_update = declare("publish.update", "the table and the update are stored, and no record names them")
_after_record = declare("publish.record", "the version is published, and old versions are not deleted yet")


class Held:
    """The weights of the newest version that this process published, in memory.

    Args:
        limit (int): weights of more bytes are not kept. Default: `HELD_BYTES`.
    """

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self.limit = limit
        self._version: tuple[str, int] | None = None
        self._tensors: dict[str, list[Bytes]] = {}

    def of(self, record: Published | None) -> dict[str, list[Bytes]]:
        """The blocks of the tensors of a version by name; empty if they are not held."""
        return (
            self._tensors if record and self._version == (record.attempt + record.weights.digest, record.number) else {}
        )

    def keep(self, record: Published, tensors: dict[str, list[Bytes]]) -> None:
        """Keep the blocks of a version in place of those of the earlier one."""
        self._version, self._tensors = (record.attempt + record.weights.digest, record.number), tensors


def publish(
    store: Store,
    name: str,
    run: str,
    base: Base,
    choice: Choice,
    *,
    held: Held | None = None,
    move: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Published:
    """Publish a committed step as the next version of `name`.

    Args:
        store: the repository.
        name: letters, digits, dots, dashes and underscores, at most 100.
        run: the run of the step.
        base: the step.
        choice: the tensors, and the dtype in which they are published.
        held: keeps the weights in memory until the next call, which then need not read them again.
        move: publish also if the version before is of another run.
        clock: the time of the record.

    Returns:
        The record of the version.

    Raises:
        ConflictError: another process published the next version first, or the name belongs to another run.
        NotFoundError: the step does not exist.
        UsageError: no tensor is selected, or the name is invalid.
    """
    held = held or Held(0)
    before = records.find(store, name)
    if before is not None and before.run != run and not move:
        raise ConflictError(
            f"{name} is published from run {before.run}, not from {run}", hint="give move=True to publish another run"
        )
    number = before.number + 1 if before else 1
    tag = records.tag_of(name, number, names.new_id(clock))
    tags.tag(store, tag, run, base, clock=clock)
    _after_tag()
    with ExitStack() as stack:
        step = SavedStep(store, stack.enter_context(chunk_reader.LeasedStep(store, run, base, clock)), 0)
        prefix, tensors = published_tensors(step, choice)
        old = stack.enter_context(_OldVersion(store, before, held, clock)) if before else None
        comparison = _Comparison(tensors, old, held)
        update = None
        if old:
            update = store_update(store, name, comparison.changes(), clock)
        else:
            comparison.only_digests()
        weights = store_weights(store, name, comparison.weights())
    if update is not None and comparison.stored_bytes > _WORTH * comparison.changed_bytes:
        store.delete_many([f"{records.folder(name)}{update.key}"])
        update = None
    _after_update()
    record = Published(
        name=name,
        number=number,
        run=run,
        timeline=base.timeline,
        step=base.step,
        attempt=base.attempt,
        tag=tag,
        include=choice.include,
        exclude=choice.exclude,
        prefix=prefix,
        dtype=choice.dtype,
        bytes=comparison.nbytes,
        weights=weights,
        update=update,
        parent=before.number if before and update else 0,
        created=clock.time(),
        process=this_process(),
    )
    if not records.write(store, record):
        raise ConflictError(
            f"another process published version {number} of {name} first", hint="publish again for the next version"
        )
    _after_record()
    held.keep(record, comparison.kept)
    _delete_old(store, record, clock)
    return record


class _OldVersion:
    """A context manager that gives access to the blocks of the version before, in memory or in its step."""

    def __init__(self, store: Store, record: Published, held: Held, clock: Clock) -> None:
        self._store, self._record, self._clock = store, record, clock
        self._held, self._stack = held.of(record), ExitStack()
        self._tensors: dict[str, PublishedTensor] = {}
        self.weights = Weights(())

    def __enter__(self) -> _OldVersion | None:
        """Open the version. None if it cannot be read: the new version then has no update."""
        record = self._record
        try:
            self.weights = load_weights(self._store, record)
            if not self._held:
                leased = chunk_reader.LeasedStep(self._store, record.run, record.base, self._clock)
                step = SavedStep(self._store, self._stack.enter_context(leased), 0)
                choice = Choice(record.include, record.exclude, record.dtype)
                self._tensors = {tensor.name: tensor for tensor in published_tensors(step, choice)[1]}
        except (NotFoundError, CorruptionError) as error:
            self._stack.close()
            _log.warning(
                "version %s of %s cannot be read, so the next version has no update: %s",
                record.number,
                record.name,
                error,
            )
            return None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def blocks(self, names: Sequence[str]) -> Iterator[Bytes]:
        """The blocks of these tensors, one after the other."""
        if self._held:
            return (block for name in names for block in self._held.get(name, ()))
        return (block for _, block in blocks_of([self._tensors[name] for name in names]))


class _Comparison:
    """Compares the new version with the old one in one pass over both.

    Attributes:
        nbytes: bytes of all tensors.
        changed_bytes: bytes of the blocks that changed.
        stored_bytes: bytes of these blocks in the update.
        kept: the blocks of the new tensors, if they are not larger than the limit of `held`.
    """

    def __init__(self, tensors: list[PublishedTensor], old: _OldVersion | None, held: Held) -> None:
        self._tensors, self._old = tensors, old
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.changed_bytes = self.stored_bytes = 0
        self._digests: list[list[bytes]] = [[] for _ in tensors]
        self._keeps = self.nbytes <= held.limit
        self.kept: dict[str, list[Bytes]] = {}

    def changes(self) -> Iterator[EncodedBlock]:
        """Yield the changed blocks, encoded. Threads encode the next blocks meanwhile."""
        for number, block, (digest_, encoded) in _in_threads(self._pairs()):
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
        return Weights(
            tuple(TensorBlocks(t.name, name_of(t.dtype), tuple(t.lazy.shape), b"".join(d)) for t, d in entries)
        )

    def _pairs(self) -> Iterator[tuple[int, int, Bytes, Bytes | None, bytes, int]]:
        """Yield each block with the old one: tensor, block, new and old bytes, old digest, bytes of an element."""
        forms = [TensorBlocks(t.name, name_of(t.dtype), tuple(t.lazy.shape), b"") for t in self._tensors]
        before = {form.name: self._old_form(form) for form in forms}
        old_blocks = self._old.blocks([name for name, old in before.items() if old]) if self._old else iter(())
        block, current = 0, -1
        for number, new in blocks_of(self._tensors):
            block, current = (block + 1 if number == current else 0), number
            form = forms[number]
            old = before[form.name]
            if self._keeps:
                self.kept.setdefault(form.name, []).append(new)
            yield number, block, new, next(old_blocks) if old else None, old.digest_of(block) if old else b"", form.item

    def _old_form(self, form: TensorBlocks) -> TensorBlocks | None:
        """The old tensor of this name, if it has the same dtype and shape."""
        old = self._old.weights.by_name.get(form.name) if self._old else None
        return old if old and old.same_form(form) else None


_Compared = tuple[bytes, tuple[int, bytes, int] | None]
"""The digest of a block, and, if it changed, how it is stored, its stored bytes and its size."""


def _compare(new: Bytes, old: Bytes | None, old_digest: bytes, item: int) -> _Compared:
    digest_ = digest(new.data)
    if digest_ == old_digest:
        return digest_, None
    how, data = (WHOLE, new.tobytes()) if old is None else encode(new, old, item)
    return digest_, (how, data, len(new))


def _in_threads(
    pairs: Iterator[tuple[int, int, Bytes, Bytes | None, bytes, int]],
) -> Iterator[tuple[int, int, _Compared]]:
    """Compare blocks in threads, and yield the results in order. At most `8 * _THREADS` blocks wait."""
    waiting = deque[tuple[int, int, Future[_Compared]]]()
    with ThreadPoolExecutor(_THREADS, "headrace-publish") as pool:
        for number, block, new, old, old_digest, item in pairs:
            waiting.append((number, block, pool.submit(_compare, new, old, old_digest, item)))
            if len(waiting) >= 8 * _THREADS:
                first = waiting.popleft()
                yield first[0], first[1], first[2].result()
        for number, block, future in waiting:
            yield number, block, future.result()


def _delete_old(store: Store, newest: Published, clock: Clock) -> None:
    """Delete what old versions need no more. A failure is logged: the next publisher tries again."""
    try:
        numbered, others = records.listed(store, newest.name)
        keys = [info.key for number, info in numbered.items() if number <= newest.number - records.KEPT_VERSIONS]
        kept = set[str]()
        for number in numbered:
            if number > newest.number - records.KEPT_VERSIONS:
                with suppress(NotFoundError, CorruptionError):
                    record = records.read_record(store, newest.name, number)
                    kept |= {record.tag} | {
                        record.key_of(one) for one in (record.weights, record.update) if one is not None
                    }
        orphaned = clock.time() - records.ORPHAN_SECONDS
        keys += [info.key for info in others if info.key not in kept and info.modified < orphaned]
        for tag in tag_records.listed(store):
            of_tag = records.number_of_tag(newest.name, tag)
            if of_tag is not None and (of_tag < newest.number - 1 or (of_tag <= newest.number and tag not in kept)):
                keys.append(tag_records.key_of(tag))  # no other process moves this tag
        store.delete_many(keys)
    except HeadraceError as error:
        _log.warning("old versions of %s could not be deleted: %s", newest.name, error)
