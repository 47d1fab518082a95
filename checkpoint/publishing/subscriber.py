"""`Subscriber` follows a published name, and `NewVersion.apply` brings tensors in use to a new version.

Invariants:

- *All or nothing.* Everything is fetched, decoded and verified before the first element changes. The changes that follow
  make no request. So tensors hold one version, or an error was raised before they changed.
- Elements that did not change are not written. If the program changed tensors between two versions, and an update shows
  it, all blocks are read from the step.
- A block that is completely in a tensor of this process has the digest of the version's table after the change. For
  parts of tensors, the bytes of the update or of the step are verified.

Failure behaviour: an update that is damaged or missing is logged, and the step is read instead. `apply` raises the errors
of the step: `NotFoundError` if retention removed it, `CorruptionError` if it is damaged. The tensors are then unchanged,
except by the first `apply`: it needs no copy of the weights, and writes into the tensors as it reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.changes import OtherContentError, PreparedChanges, from_step, from_updates
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.targets import Target, targets_of
from headrace.checkpoint.publishing.updates import Update, stored_bytes
from headrace.checkpoint.publishing.weights import Weights, load_weights
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import CorruptionError, DeadlineError, NotFoundError, UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

POLL_SECONDS = 1.0
_log = get_logger(__name__)


class Subscriber:
    """Follows the versions of a published name.

    Args:
        url (str | os.PathLike[str] | Store): The repository: a path, `s3://bucket/prefix`, or an open `Store`.
        name (str): The published name.
        poll (float): Seconds between two looks for a new version. Default: 1.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Attributes:
        version (int | None): The number of the version that the tensors hold; None before the first `apply`.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer
        >>> folder, model, serving = tempfile.mkdtemp(), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     handle = checkpointer.save(1, {"model": model})
        ...     _ = checkpointer.publish("policy", handle, include="model/*")
        >>> with Subscriber(folder, "policy") as subscriber:
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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        records.folder(name)
        if not poll > 0:
            raise UsageError(f"poll is {poll!r}", hint="give seconds, more than 0")
        self._owns_store = not isinstance(url, Store)
        self.store = url if isinstance(url, Store) else open_store(url, storage_options=storage_options)
        self.name, self._poll, self.clock = name, poll, clock
        self._held: tuple[Published, Weights] | None = None

    @property
    def version(self) -> int | None:
        return self._held[0].number if self._held else None

    def newest(self) -> NewVersion | None:
        """The newest version if it is not the one that the tensors hold, else None. It may be an older step: a rollback."""
        record = records.find(self.store, self.name)
        if record is None or record.number == self.version:
            return None
        return NewVersion(self, record)

    def wait(self, timeout: float | None = None) -> NewVersion:
        """Wait for a version that the tensors do not hold.

        Args:
            timeout (float | None): Limit in seconds. Default: None, no limit.

        Returns:
            NewVersion: The newest version.

        Raises:
            DeadlineError: There is none within `timeout`.
        """
        until = None if timeout is None else self.clock.monotonic() + timeout
        while (version := self.newest()) is None:
            remaining = self._poll if until is None else min(self._poll, until - self.clock.monotonic())
            if remaining <= 0:
                raise DeadlineError(f"no new version of {self.name} within {timeout:g} s")
            self.clock.sleep(remaining)
        return version

    def held(self) -> tuple[Published, Weights] | None:
        """The version that the tensors hold, and its table."""
        return self._held

    def now_holds(self, record: Published, weights: Weights) -> None:
        """Note the version that the tensors hold."""
        self._held = record, weights

    def close(self) -> None:
        """Release the store."""
        if self._owns_store:
            self.store.close()

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
        self._subscriber, self._record, held = subscriber, record, subscriber.held()
        self.number, self.run, self.step, self.attempt = record.number, record.run, record.step, record.attempt
        self._weights = load_weights(subscriber.store, record)
        self._held = held
        self.parent = held[0].number if held else None
        self._chain = self._find_chain() if held else None

    @property
    def bytes_to_fetch(self) -> int:
        """Bytes that a process with all tensors fetches: those of the updates, or of the changed blocks of the step."""
        if self._chain is not None:
            return sum(stored_bytes(update.rows) for update, _ in self._chain)
        return self._changed_bytes()

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Bring the tensors to this version: `prepare`, then `commit`.

        Args:
            tensors (Mapping[str, torch.Tensor]): The tensors by their published names, such as `model.state_dict()`. A
                `DTensor` gets this rank's part. Other entries are left as they are.

        Raises:
            UsageError: A published tensor is missing, or has another shape or dtype; nothing was changed. Or the
                subscriber has applied another version since.
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
        if self._subscriber.held() is not self._held:
            raise UsageError("another version was applied meanwhile", hint="call wait() again")
        changes = self._changes(targets_of(self._weights, tensors))
        return Prepared(self._subscriber, self._record, self._weights, changes)

    def _changes(self, targets: Mapping[str, Target]) -> PreparedChanges:
        store = self._subscriber.store
        changed = self._weights.changed_blocks(self._held[1]) if self._held else None
        if self._chain is not None:
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
        store, (held, held_weights) = self._subscriber.store, self._held
        chain, record, weights = list[tuple[Update, Weights]](), self._record, self._weights
        try:
            while record.number > held.number:
                if record.update is None or not record.parent:
                    return None
                chain.append((Update(store, record, weights), weights))
                record = records.read_record(store, record.name, record.parent)
                weights = held_weights if record.number == held.number else load_weights(store, record)
        except (CorruptionError, NotFoundError) as error:
            _log.info("version %s of %s is read from its step: %s", self.number, record.name, error)
            return None
        if record != held or sum(stored_bytes(update.rows) for update, _ in chain) > self._changed_bytes():
            return None
        return chain[::-1]

    def _changed_bytes(self) -> int:
        if self._held is None:
            return self._weights.nbytes
        changed = self._weights.changed_blocks(self._held[1])
        by_name = self._weights.by_name
        return sum(by_name[name].size_of(block) for name, blocks in changed.items() for block in blocks)


class Prepared:
    """Verified changes that wait for `commit`."""

    def __init__(self, subscriber: Subscriber, record: Published, weights: Weights, changes: PreparedChanges) -> None:
        self._subscriber, self._record, self._weights, self._changes = subscriber, record, weights, changes
        self._held = subscriber.held()

    def commit(self) -> None:
        """Change the tensors. No other thread may use them meanwhile.

        Raises:
            UsageError: The subscriber has applied another version since; nothing was changed.
        """
        if self._subscriber.held() is not self._held:
            raise UsageError("another version was applied meanwhile", hint="call wait() again")
        self._changes.commit()
        self._subscriber.now_holds(self._record, self._weights)
