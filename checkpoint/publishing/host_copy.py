"""`HostCopy` holds the weights of a published name in main memory, and prepares the newest version in the background.

Inference engines store weights in a form of their own: divided over ranks, fused, quantized. They take tensors by the
names of the checkpoint, and cannot give them back. So the published tensors are kept next to them.

Invariants:

- The tensors hold one published version, or none. Every byte was verified.
- The background thread changes tensors only while they hold no version yet. Otherwise it fetches and verifies.
- `bring_to` changes the tensors after everything is verified, and to exactly the version that it names.

Failure behaviour: an error of `bring_to` leaves the tensors at the version before, as `Prepared.commit` does. Errors in
the background are logged once, and `bring_to` tries again.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import torch

from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.subscriber import POLL_SECONDS, NewVersion, Prepared, Subscriber
from headrace.dataio.core.errors import DeadlineError
from headrace.dataio.core.log import get_logger

_CLOSE_SECONDS = 10.0
"""How long `close` waits for the background thread. The thread ends with the process in any case."""
_log = get_logger(__name__)


class HostCopy:
    """The tensors of a published name in main memory.

    Args:
        subscriber (Subscriber): Follows the name. The copy closes it.
        poll (float): Seconds between two looks for a newer version in the background. Default: 1.

    Attributes:
        tensors (dict[str, torch.Tensor]): The tensors by their published names. Read them only.
        version (NewVersion | None): The version that they hold; None before the first, and after a change that failed.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer, Subscriber
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 2)
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     handle = checkpointer.save(1, {"model": model})
        ...     _ = checkpointer.publish("policy", handle)
        >>> with HostCopy(Subscriber(folder, "policy")) as copy:
        ...     version = copy.bring_to(1, timeout=60)
        ...     version.changed_since(None)
        ['bias', 'weight']
    """

    def __init__(self, subscriber: Subscriber, poll: float = POLL_SECONDS) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: NewVersion | None = None
        self._subscriber, self._poll = subscriber, poll
        self._prepared: tuple[NewVersion, Prepared, dict[str, torch.Tensor]] | None = None
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self) -> None:
        """Prepare the newest version in the background, from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-host-copy", daemon=True)
            self._thread.start()

    def bring_to(self, number: int, timeout: float) -> NewVersion:
        """Change the tensors to a version.

        Args:
            number (int): The version, which need not be the newest, nor published yet.
            timeout (float): Limit in seconds of the wait for it.

        Returns:
            NewVersion: The version that the tensors hold now.

        Raises:
            DeadlineError: It is not published within `timeout`, or the background thread fetches for longer.
            NotFoundError: The version, or its step, was removed.
            CorruptionError: Its step is damaged.
        """
        clock = self._subscriber.clock
        until = clock.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            raise DeadlineError(
                f"another version of {self._subscriber.name} is still being fetched after {timeout:g} s",
                hint="ask again with a longer timeout",
            )
        try:
            if self.version is None or self.version.number != number or self._subscriber.version is None:
                if self._prepared is None or self._prepared[0].number != number:
                    self._prepare(self._subscriber.at(number, max(until - clock.monotonic(), 0.0)))
                self._commit()
            assert self.version is not None
            return self.version
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the background thread, and close the subscriber."""
        self._closing.set()
        self._subscriber.close()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _prepare(self, version: NewVersion) -> None:
        self._prepared = None
        if version.parent is None:
            self.version = None  # the tensors are written as they are read
        tensors = version.empty_tensors(self.tensors)
        self._prepared = version, version.prepare(tensors), tensors

    def _commit(self) -> None:
        assert self._prepared is not None
        (version, prepared, tensors), self._prepared = self._prepared, None
        try:
            prepared.commit()
        finally:
            if self._subscriber.version is None:
                self.version = None  # the change failed half-way
        self.version, self.tensors = version, tensors

    def _prepare_newest(self) -> None:
        subscriber, prepared = self._subscriber, self._prepared  # read once: `bring_to` may replace it
        held = prepared[0] if prepared is not None else self.version
        newest = records.newest_number(subscriber.store, subscriber.name)
        if newest is None or (held is not None and held.number == newest):
            return
        with self._lock:
            if self._closing.is_set() or newest == subscriber.version:
                return
            self._prepare(subscriber.at(newest, 0.0))
            if self.version is None:
                self._commit()

    def _run(self) -> None:
        logged = ""
        while True:
            try:
                self._prepare_newest()
                logged = ""
            except Exception as error:  # also of CUDA and of memory: the thread goes on, and `bring_to` raises its own
                if not self._closing.is_set() and logged != str(error):
                    logged = str(error)
                    _log.warning("the newest version of %s is not prepared: %s", self._subscriber.name, error)
            if self._closing.wait(self._poll):
                return
