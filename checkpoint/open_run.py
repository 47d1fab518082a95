"""`OpenRun`: the parts of a checkpointer, what it says about its run, and how it is closed.

Invariant: everything that the checkpointer opened is closed once. A forked child closes nothing.
Failure behaviour: `close` raises the first error of a failed save that was not fetched.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace.checkpoint.attachments import Attachments
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.handle import Handle
from headrace.checkpoint.lineage import Lineage
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.recording import Description
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import timeline
from headrace.checkpoint.repository.collect import Retention
from headrace.checkpoint.restoring.restorer import Restorer
from headrace.checkpoint.saver import Saver
from headrace.checkpoint.saves import Saves
from headrace.checkpoint.saving.executor import SaveExecutor
from headrace.checkpoint.trackers.background import CLOSE_SECONDS, BackgroundTrackers
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.checkpoint.publishing.background import BackgroundPublisher

_log = get_logger(__name__)


class OpenRun:
    """One run that is open for saves. `Checkpointer` creates the parts."""

    _run: str
    _ranks: Ranks
    _store: Store
    _owns_store: bool
    _executor: SaveExecutor
    _retention: Retention | None
    _lineage: Lineage
    _saves: Saves
    _attachments: Attachments
    _description: Description
    _saver: Saver
    _restorer: Restorer
    _publisher: BackgroundPublisher | None
    _trackers: BackgroundTrackers
    _wait: float
    _closed: bool
    _pid: int

    @property
    def run(self) -> str:
        """The run that this checkpointer saves to."""
        return self._run

    def steps(self) -> list[int]:
        """The steps that `restore` finds, in ascending order.

        These are the steps of the newest timeline, and those of its ancestors up to each branch point. The latest step
        is the newest of the newest timeline. After a trainer went back, it may have a lower number than others.
        """
        self._check_open()
        if repository.read_repo(self._store) is None:
            return []
        return sorted(base.step for base in repository.visible(self._store, self._run))

    def is_committed(self, run: str, attempt: Base) -> bool:
        """Whether this attempt is a committed step of the run, in any timeline."""
        self._check_open()
        return repository.is_step(self._store, run, attempt)

    def is_over(self, run: str, attempt: Base) -> bool:
        """Whether a newer timeline prevents this attempt from being committed."""
        self._check_open()
        return timeline.newest_after(self._store, run, attempt.timeline) is not None

    def last_save_of(self, step: int) -> Handle | None:
        """The save of this step by this checkpointer, in flight or committed; None if there is none or it failed.

        The error of a failed save of this step then counts as fetched, so `close` does not raise it.
        """
        return self._saves.of(step)

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves in flight, then release everything. Does nothing in a forked child.

        With `uploads="newest"`, the last step is uploaded if only the node's tier has it. Call it on all ranks then. If
        an error ends the `with` block of one of several ranks, that rank uploads nothing: the next restore does.

        Args:
            timeout (float | None): Limit of the wait in seconds. Default: None, the checkpointer's `timeout`.

        Raises:
            DeadlineError: A save or the upload is still in flight, or a version is not published yet.
            HeadraceError: A save failed and no handle has raised its error.
        """
        self._close(self._wait if timeout is None else timeout, uploads_last=True)

    def _close(self, timeout: float, uploads_last: bool) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        try:
            self._saves.wait_for_all(timeout)
            if uploads_last and (last := self._saver.upload_last()) is not None:
                self._trackers.follow_save(*last)
                self._saves.wait_for_all(max(deadline - time.monotonic(), 0.0))
            if self._publisher is not None:
                self._publisher.close(timeout)
            if self._retention is not None:
                self._retention.wait(timeout)
            self._saves.raise_unfetched()
        finally:
            if self._publisher is not None:
                self._publisher.cancel_waiting()  # also if a save is late
            self._trackers.close(CLOSE_SECONDS if self._saves.all_done else 0)
            self._saver.close()
            self._executor.close()
            self._lineage.close()
            if self._owns_store and self._saves.all_done and (self._publisher is None or self._publisher.is_idle):
                self._store.close()
            self._saver.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # after an error, other ranks may not come here; then the step stays in the tiers, and a restore uploads it
        is_usual = kind is None or issubclass(kind, SystemExit) or self._ranks.world_size == 1
        try:
            self._close(self._wait, uploads_last=is_usual)
        except Exception as second:
            if error is None:
                raise
            _log.error("closing after %s: %s", kind.__name__ if kind else "an error", second)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpointer is closed", hint="create another Checkpointer")
        if os.getpid() != self._pid:
            raise UsageError(
                f"the checkpointer belongs to process {self._pid}, from which this one was forked",
                hint="create another Checkpointer in this process",
            )
