"""Publishes a committed step as the next version of a name.

Purpose: `publish` reads the selected tensors of a step, compares them with those of the version before, and writes the
table of their blocks, the update, and last the record, which makes the version visible.

Invariants:

- A record names a committed step. A tag keeps the step from the time before the record is written. A lease keeps it until
  after that.
- The update leads from the version before to this one, block by block. An old block that does not have its digest is not
  used.
- Memory: two pieces of a tensor of each version and a few blocks. If `Held` keeps the weights, also those of the newest
  version, and meanwhile those of the next one.

Failure behaviour: `ConflictError` if another process published the next version first, or if the name belongs to
another run. A publisher that dies leaves the version before. A version before that cannot be read makes a version without an
update. A publication that fails leaves no tag, unless it is unknown whether its record was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Base, this_process
from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.difference import WHOLE, Bytes, encode
from headrace.checkpoint.publishing.records import Published, Stored
from headrace.checkpoint.publishing.source import Choice, PublishedTensor, blocks_of, published_tensors
from headrace.checkpoint.publishing.updates import EncodedBlock, store_update
from headrace.checkpoint.publishing.weights import TensorBlocks, Weights, load_weights, store_weights
from headrace.checkpoint.repository import tag_records, tags
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.checkpoint.state.tensors import name_of
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, NotFoundError, UsageError
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
        name: letters, digits, dots, dashes and underscores, at most 80.
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
    before, number = _newest(store, name)
    if before is not None and before.run != run and not move:
        raise ConflictError(
            f"{name} is published from run {before.run}, not from {run}", hint="give move=True to publish another run"
        )
    records.key_of(name, number)
    tag = records.tag_of(name, number, names.new_id(clock))
    with ExitStack() as stack:
        with _tag_removed_after_an_error(store, tag):
            tags.tag(store, tag, run, base, clock=clock)
            _after_tag()
            step = SavedStep(store, stack.enter_context(chunk_reader.LeasedStep(store, run, base, clock)), 0)
            prefix, tensors = published_tensors(step, choice)
            comparison, update = _compared(store, name, tensors, before, held, clock)
            weights = store_weights(store, name, comparison.weights(), clock)
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
                parent_weights=before.weights.digest if before and update else "",
                created=clock.time(),
                process=this_process(),
            )
        written = records.write(store, record)  # an error may leave a record, which needs the tag
    if written:
        _after_record()
        held.keep(record, comparison.kept)
        if _delete_old(store, record) < number + records.KEPT_VERSIONS:
            return record  # otherwise the record of this number had been deleted, and no subscriber reads this one
    else:
        _delete_tag(store, tag)
    raise ConflictError(
        f"another process published version {number} of {name} first", hint="publish again for the next version"
    )


def _newest(store: Store, name: str) -> tuple[Published | None, int]:
    """The newest version, and the number of the next one. A damaged record does not stop the next version."""
    try:
        before = records.find(store, name)
    except CorruptionError as error:
        number = records.newest_number(store, name) or 0
        _log.warning("the newest version of %s cannot be read, so the next version has no update: %s", name, error)
        return None, number + 1
    if before is not None:
        return before, before.number + 1
    return None, (records.newest_number(store, name) or 0) + 1  # after a withdrawal, numbers go on


@contextmanager
def _tag_removed_after_an_error(store: Store, tag: str) -> Iterator[None]:
    """Delete the tag if the block raises. Otherwise a program whose publications all fail would keep all its steps."""
    try:
        yield
    except Exception:
        _delete_tag(store, tag)
        raise


def _delete_tag(store: Store, tag: str) -> None:
    """Delete a tag, which no other process moves. If that fails, the next publisher deletes it."""
    with suppress(HeadraceError):
        store.delete_many([tag_records.key_of(tag)])


def _compared(
    store: Store,
    name: str,
    tensors: list[PublishedTensor],
    before: Published | None,
    held: Held,
    clock: Clock,
) -> tuple[_Comparison, Stored | None]:
    """Compare with the version before, and store the update. Without one if that version cannot be read."""
    if before is not None:
        try:
            with _OldVersion(store, before, held, clock) as old:
                comparison = _Comparison(tensors, old, held)
                update = store_update(store, name, comparison.changes(), clock)
            if comparison.stored_bytes <= _WORTH * comparison.changed_bytes:
                return comparison, update
            store.delete_many([f"{records.folder(name)}{update.key}"])
            return comparison, None
        except (UsageError, CorruptionError) as error:
            _log.warning(
                "version %s of %s cannot be read, so the next version has no update: %s", before.number, name, error
            )
    comparison = _Comparison(tensors, None, held)
    comparison.only_digests()
    return comparison, None


class _OldVersion:
    """A context manager that gives access to the blocks of the version before, in memory or in its step."""

    def __init__(self, store: Store, record: Published, held: Held, clock: Clock) -> None:
        self._store, self._record, self._clock = store, record, clock
        self._held, self._stack = held.of(record), ExitStack()
        self._tensors: dict[str, PublishedTensor] = {}
        self.weights = Weights(())

    def __enter__(self) -> _OldVersion:
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
            return (block for name in names for block in self._held.get(name, ()))
        missing = [name for name in names if name not in self._tensors]
        if missing:
            raise CorruptionError(f"step {self._record.step} has no tensor {missing[0]!r:.200}")
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
    if old is None or digest(old.data) != old_digest:
        return digest_, (WHOLE, new.tobytes(), len(new))
    how, data = encode(new, old, item)
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


def _needed(record: Published) -> set[str]:
    """The tag of a version, and the keys of its objects."""
    return {record.tag} | {record.key_of(one) for one in (record.weights, record.update) if one is not None}


def _delete_old(store: Store, newest: Published) -> int:
    """Delete what old versions need no more. Return the number of the newest version in the store.

    A failure is logged: the next publisher tries again.
    Orphans are older than the record of `newest` by `ORPHAN_SECONDS`, by the store's clock. So they do not belong to a
    publisher that may still win: it began after that record.
    """
    try:
        numbered, others = records.listed(store, newest.name)
        keys = [info.key for number, info in numbered.items() if number <= newest.number - records.KEPT_VERSIONS]
        if newest.number not in numbered:
            return max(numbered, default=0)
        orphaned = numbered[newest.number].modified - records.ORPHAN_SECONDS
        old = [info.key for info in others if info.modified < orphaned]
        kept = _needed(newest)
        for number in numbered:
            if number > newest.number - (records.KEPT_VERSIONS if old else 2):
                with suppress(NotFoundError, CorruptionError):
                    kept |= _needed(records.read_record(store, newest.name, number))
        keys += [key for key in old if key not in kept]
        for tag in tag_records.listed(store):
            of_tag = records.number_of_tag(newest.name, tag)
            if of_tag is not None and (of_tag < newest.number - 1 or (of_tag <= newest.number and tag not in kept)):
                keys.append(tag_records.key_of(tag))  # no other process moves this tag
        store.delete_many(keys)
        return max(numbered)
    except HeadraceError as error:
        _log.warning("old versions of %s could not be deleted: %s", newest.name, error)
        return newest.number
