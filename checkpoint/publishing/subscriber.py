"""`Subscriber` follows a published name, and `NewVersion.apply` brings tensors in use to a new version.

Invariants:

- *All or nothing.* Everything is fetched, decoded and verified before the first element changes. The changes that follow
  make no request. So tensors hold one version, or an error was raised before they changed.
- Blocks that did not change are not written. If the program changed tensors between two versions, and an update shows
  it, all blocks are read from the step. So they are if the tensors have other memory than those of the version before.
- A block that is completely in a tensor of this process has the digest of the version's table after the change. For
  parts of tensors, the bytes of the update or of the step are verified.
- An update is used only if it starts from the table of the version that the tensors hold.
- Of several `Prepared` for the same tensors, one can be committed. Threads may share a subscriber.

Failure behaviour: an update that is damaged or missing is logged, and the step is read instead. `apply` raises the errors
of the step: `NotFoundError` if retention removed it, `CorruptionError` if it is damaged. The tensors are then unchanged,
except by the first `apply`: it needs no copy of the weights, and writes into the tensors as it reads. If `commit` itself
fails, the tensors hold no version, and the next `apply` is a first one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.changes import OtherContentError, PreparedChanges, from_step, from_updates
from headrace.checkpoint.publishing.records import Published, WithdrawnError
from headrace.checkpoint.publishing.targets import Place, Target, targets_of
from headrace.checkpoint.publishing.updates import Update, stored_bytes
from headrace.checkpoint.publishing.weights import Weights, load_weights
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import CorruptionError, DeadlineError, NotFoundError, UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.store import SidecarStore, through_sidecar
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

POLL_SECONDS = 1.0
_LOOKS_TO_LISTING = 16
"""`wait` asks for the next record, and lists the records every so many looks: a listing costs ten times as much on S3."""
_log = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class State:
    """What the tensors hold. A new one replaces it with each change, so that a change cannot be missed.

    Args:
        version: the record and its table; None if the tensors hold no version.
        places: the tensors' memory by name.
    """

    version: tuple[Published, Weights] | None = None
    places: Mapping[str, Place] = field(default_factory=dict)


class Subscriber:
    """Follows the versions of a published name.

    Args:
        url (str | os.PathLike[str] | Store): The repository: a path, `s3://bucket/prefix`, or an open `Store`.
        name (str): The published name.
        poll (float): Seconds between two looks for a new version, each of which is one request. Default: 1.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.
        sidecar (str | os.PathLike[str] | None): "auto" reads through the node's daemon if it answers, so that the
            processes of a node fetch each byte once; a path names its socket; None reads the store directly. Default:
            "auto".

    Attributes:
        version (int | None): The number of the version that the tensors hold; None before the first `apply`, and after a
            `commit` that failed.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer
        >>> folder, model, serving = tempfile.mkdtemp(), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     handle = checkpointer.save(1, {"model": model})
        ...     _ = checkpointer.publish("policy", handle, include="model/*")
        >>> with Subscriber(folder, "policy", sidecar=None) as subscriber:
        ...     subscriber.wait(timeout=60).apply(serving.state_dict())
        >>> torch.equal(model.weight, serving.weight)
        True
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        name: str,
        *,
        poll: float = POLL_SECONDS,
        storage_options: Mapping[str, Any] | None = None,
        sidecar: str | os.PathLike[str] | None = "auto",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        records.folder(name)
        if not poll > 0:
            raise UsageError(f"poll is {poll!r}", hint="give seconds, more than 0")
        self._opened = ExitStack()
        direct = (
            url
            if isinstance(url, Store)
            else self._opened.enter_context(open_store(url, storage_options=storage_options))
        )
        self.store = through_sidecar(direct, sidecar, records.never_changes, clock)
        if self.store is not direct:
            self._opened.callback(self.store.close)
        self.name, self._poll, self.clock = name, poll, clock
        self._state, self._lock, self._closed = State(), threading.Lock(), False

    @property
    def version(self) -> int | None:
        return self._state.version[0].number if self._state.version else None

    def newest(self) -> NewVersion | None:
        """The newest version if it is not the one that the tensors hold, else None. It may be an older step: a rollback."""
        if self._closed:
            raise UsageError(f"the subscriber of {self.name} is closed", hint="create another Subscriber")
        record = records.find(self.store, self.name, self.version)
        return NewVersion(self, record) if record is not None else None

    def wait(self, timeout: float | None = None) -> NewVersion:
        """Wait for a version that the tensors do not hold.

        Args:
            timeout (float | None): Limit in seconds. Default: None, no limit.

        Returns:
            NewVersion: The newest version.

        Raises:
            DeadlineError: There is none within `timeout`.
            UsageError: The subscriber is closed, also by another thread during the wait.
        """
        until = None if timeout is None else self.clock.monotonic() + timeout
        with self.store.limited(until) if isinstance(self.store, SidecarStore) else nullcontext():
            return self._wait(until, timeout)

    def _wait(self, until: float | None, timeout: float | None) -> NewVersion:
        looks = 0
        while (version := self.newest() if self._is_worth_listing(looks) else None) is None:
            looks += 1
            remaining = self._poll if until is None else min(self._poll, until - self.clock.monotonic())
            if remaining <= 0:
                raise DeadlineError(
                    f"no new version of {self.name} within {timeout:g} s",
                    hint="wait again; `headrace ckpt published` lists the newest versions",
                )
            self.clock.sleep(remaining)
        return version

    def at(self, number: int, timeout: float | None = None) -> NewVersion:
        """Wait for the version with this number, also if there is a newer one. So several processes change together.

        Args:
            number (int): The number, from 1 on. It may be less than that of the version that the tensors hold.
            timeout (float | None): Limit in seconds. Default: None, no limit.

        Returns:
            NewVersion: That version.

        Raises:
            DeadlineError: It is not published within `timeout`.
            NotFoundError: Its record was removed: only those of the newest 32 versions are kept.
            UsageError: The tensors hold it already, or the subscriber is closed.
        """
        if number < 1 or number == self.version:
            why = "versions are numbered from 1" if number < 1 else "the tensors hold it already"
            raise UsageError(f"version {number} of {self.name}: {why}", hint="wait() gives the newest version")
        until = None if timeout is None else self.clock.monotonic() + timeout
        while True:
            if self._closed:
                raise UsageError(f"the subscriber of {self.name} is closed", hint="create another Subscriber")
            newest = records.newest_number(self.store, self.name) or 0
            if newest >= number:
                return NewVersion(self, self._kept_record(number, newest))
            remaining = self._poll if until is None else min(self._poll, until - self.clock.monotonic())
            if remaining <= 0:
                raise DeadlineError(
                    f"version {number} of {self.name} is not published after {timeout:g} s, version {newest} is",
                    hint="look at the publisher's log; `headrace ckpt published` lists the newest versions",
                )
            self.clock.sleep(remaining)

    def _kept_record(self, number: int, newest: int) -> Published:
        try:
            return records.read_record(self.store, self.name, number)
        except WithdrawnError:
            raise
        except NotFoundError as error:
            raise NotFoundError(
                f"version {number} of {self.name} was removed: version {newest} is the newest",
                hint=f"the newest {records.KEPT_VERSIONS} versions are kept; ask for one of them",
            ) from error

    def _is_worth_listing(self, looks: int) -> bool:
        """Whether there may be a new version. After 32 versions the next record has been deleted, and only a listing shows it."""
        version = self.version
        if version is None or self._closed or looks % _LOOKS_TO_LISTING == 0:
            return True
        return self.store.exists(records.key_of(self.name, version + 1))

    def state(self) -> State:
        """What the tensors hold."""
        return self._state

    @contextmanager
    def writing(self, expected: State) -> Iterator[State]:
        """A context in which one thread writes tensors, which hold no version meanwhile. Gives the new state."""
        with self._lock:
            self.require(expected)
            self._state = State()
            yield self._state

    def commit(self, expected: State, changes: PreparedChanges, new: State) -> None:
        """Apply changes that were prepared for tensors in the state `expected`."""
        with self._lock:
            self.require(expected)
            self._state = State()  # stays if the changes fail
            changes.commit()
            self._state = new

    def require(self, expected: State) -> None:
        """Raise `UsageError` if the tensors are not in this state any more."""
        if self._state is not expected:
            raise UsageError("another version was applied meanwhile", hint="call wait() again")

    def close(self) -> None:
        """Release the store. A `wait` in another thread ends with an error."""
        self._closed = True
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class NewVersion:
    """A version of a published name that a subscriber's tensors do not hold yet.

    Attributes:
        number (int): The number of the version.
        parent (int | None): The version that the tensors hold; None before the first.
        run (str), step (int), attempt (str): The step.
    """

    def __init__(self, subscriber: Subscriber, record: Published) -> None:
        self._subscriber, self._record, self._state = subscriber, record, subscriber.state()
        self.number, self.run, self.step, self.attempt = record.number, record.run, record.step, record.attempt
        self._weights = load_weights(subscriber.store, record)
        held = self._held = self._state.version
        self.parent = held[0].number if held else None
        self._chain = self._find_chain() if held else None

    @property
    def bytes_to_fetch(self) -> int:
        """Bytes that a process with all tensors fetches: those of the updates, or of the changed blocks of the step."""
        if self._chain is not None:
            return sum(stored_bytes(update.rows) for update, _ in self._chain)
        return self._changed_bytes()

    def changed_since(self, other: NewVersion | None) -> list[str]:
        """The names of the tensors that differ from those of another version, in order. All of them for None."""
        if other is None:
            return [tensor.name for tensor in self._weights.tensors]
        return list(self._weights.changed_blocks(other._weights))

    def empty_tensors(self, like: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Tensors to apply this version to, in main memory, without values yet.

        Args:
            like (Mapping[str, torch.Tensor] | None): Those of another version. A tensor with the same name, dtype and
                shape is taken from it. Default: None, all are allocated.

        Returns:
            dict[str, torch.Tensor]: A tensor of the published dtype and shape for each published name.
        """
        tensors, like = dict[str, torch.Tensor](), like or {}
        for form in self._weights.tensors:
            found, dtype = like.get(form.name), getattr(torch, form.dtype)
            fits = found is not None and (found.dtype, tuple(found.shape)) == (dtype, form.shape)
            tensors[form.name] = found if found is not None and fits else torch.empty(form.shape, dtype=dtype)
        return tensors

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Bring the tensors to this version: `prepare`, then `commit`.

        Args:
            tensors (Mapping[str, torch.Tensor]): The tensors by their published names, such as `model.state_dict()`: those
                of the version before. A `DTensor` gets this rank's part. Other entries are left as they are.

        Raises:
            UsageError: A published tensor is missing, has another shape or dtype, or shares memory with one of other
                values; nothing was changed. Or the subscriber has applied another version since.
            NotFoundError, CorruptionError: The step was removed or is damaged.
        """
        self.prepare(tensors).commit()

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        """Fetch, decode and verify the changes, and change nothing yet. The program may use the tensors meanwhile.

        The first version of a subscriber is written at once.

        Args:
            tensors (Mapping[str, torch.Tensor]): As for `apply`.

        Returns:
            Prepared: Its `commit` changes the tensors, and makes no request.

        Raises:
            The errors of `apply`.
        """
        targets = targets_of(self._weights, tensors)
        new = State((self._record, self._weights), {name: target.place for name, target in targets.items()})
        if self._held is None:
            with self._subscriber.writing(self._state) as self._state:
                changes = self._changes(targets)
        else:
            self._subscriber.require(self._state)
            changes = self._changes(targets)
        return Prepared(self._subscriber, self._state, changes, new)

    def _changes(self, targets: Mapping[str, Target]) -> PreparedChanges:
        store, before = self._subscriber.store, self._state.places
        changed = self._weights.changed_blocks(self._held[1]) if self._held else None
        if any(name in before and before[name] != target.place for name, target in targets.items()):
            _log.warning("the tensors are not those of version %s of %s: all are read", self.parent, self._record.name)
            changed = None
        elif self._chain is not None:
            try:
                return from_updates(self._chain, targets)
            except (CorruptionError, NotFoundError) as error:
                _log.warning("version %s of %s is read from its step: %s", self.number, self._record.name, error)
                if isinstance(error, OtherContentError):
                    changed = None
        return from_step(
            store, self._record, targets, changed, at_once=self._held is None, clock=self._subscriber.clock
        )

    def _find_chain(self) -> list[tuple[Update, Weights]] | None:
        """The updates from the held version to this one; None if one is missing, or the step is fewer bytes."""
        assert self._held is not None
        store, held, most = self._subscriber.store, self._held[0], self._changed_bytes()
        chain, record, weights = list[tuple[Update, Weights]](), self._record, self._weights
        try:
            while record.update is not None and len(chain) < records.KEPT_VERSIONS:
                update = Update(store, record, weights)
                chain.append((update, weights))
                most -= stored_bytes(update.rows)
                if most < 0 or record.parent < held.number:
                    return None
                if record.parent == held.number:
                    return chain[::-1] if record.parent_weights == held.weights.digest else None
                parent = records.read_record(store, record.name, record.parent)
                if parent.weights.digest != record.parent_weights:
                    return None
                record, weights = parent, load_weights(store, parent)
        except (CorruptionError, NotFoundError) as error:
            _log.info("version %s of %s is read from its step: %s", self.number, record.name, error)
        return None

    def _changed_bytes(self) -> int:
        if self._held is None:
            return self._weights.nbytes
        changed = self._weights.changed_blocks(self._held[1])
        by_name = self._weights.by_name
        return sum(by_name[name].size_of(block) for name, blocks in changed.items() for block in blocks)


class Prepared:
    """Verified changes that wait for `commit`."""

    def __init__(self, subscriber: Subscriber, state: State, changes: PreparedChanges, new: State) -> None:
        self._subscriber, self._state, self._changes, self._new = subscriber, state, changes, new

    def commit(self) -> None:
        """Change the tensors. No other thread may use them meanwhile.

        Raises:
            UsageError: The subscriber has applied another version since; nothing was changed.
        """
        self._subscriber.commit(self._state, self._changes, self._new)
