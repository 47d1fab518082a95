"""Names of steps: the files and folders in which a framework finds the checkpoint to resume from.

A framework resumes from a file or folder that it finds (`last.ckpt`, `checkpoint-1200`). Such a name must never refer
to a step that is not committed. A save therefore handles its name in this order:

1. It writes a hidden name (`.checkpoint-1200.<attempt>.uncommitted`), with a record of its attempt.
2. After the attempt is committed, it renames the hidden name.
3. It then removes older names.

A process that is killed between these steps leaves a hidden name. The next process publishes it if the attempt was
committed, and deletes it if the attempt can never be committed (`Names.recover`).

Invariant: a name refers to a committed attempt. A name that is used again is replaced. An earlier save never replaces
the name of a later one. See also `name_files`.

Failure behaviour: a save whose name cannot be written fails with `UsageError`, although the step may be committed.
Later failures (another name of the step, removing old names) are logged. `recover` logs a name that it cannot publish
and leaves it hidden. It does not raise, because the other ranks wait for this rank. `MissingStepError` is a
`NotFoundError` and a `FileNotFoundError`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.checkpoint.api import Checkpointer
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.frameworks import name_files
from headrace.checkpoint.frameworks.name_files import Record, read_name, write_file
from headrace.checkpoint.handle import Handle
from headrace.checkpoint.repository.commit import FinalError
from headrace.checkpoint.repository.steps import MissingStepError
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError, TransientError, UsageError
from headrace.dataio.core.log import get_logger

_KEPT_UNPUBLISHED = 2
"""The number of names of failed saves that are kept, because a sidecar may still commit them."""
_log = get_logger(__name__)

_hidden = declare("name.hidden", "the attempt has an id and a hidden name; no object of it is stored")
_committed = declare("name.committed", "the step is committed; its name is hidden")
_named = declare("name.named", "the step has its name; older names still exist")


class Names:
    """The names of one adapter.

    Call `save` and `wait` from one thread. The threads of the saves publish and remove names.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._begun = self._published = 0
        self._in_flight: dict[int, _Name] = {}
        self._newest: dict[Path, int] = {}
        self._to_remove: list[tuple[int, Path]] = []
        self._unpublished: list[Path] = []
        self._handles: list[Handle] = []
        self._latest: _Name | None = None

    def save(
        self,
        step: int,
        state: dict[str, Any],
        path: Path | None,
        write: Callable[[Path, Record], None],
        then: Callable[[], None] = lambda: None,
        metadata: Metadata | None = None,
    ) -> Handle:
        """Begin to save `state`. After the save is committed, `path` becomes its name.

        All ranks call it. Ranks that create no name pass None as `path`.

        Args:
            step (int): The step's number.
            state (dict[str, Any]): The state, as for `Checkpointer.save`.
            path (Path | None): The file or folder that names the step.
            write (Callable[[Path, Record], None]): Writes the hidden file or folder.
            then (Callable[[], None]): Called after the name is published.
            metadata (Metadata | None): As for `Checkpointer.save`.

        Returns:
            Handle: The save in flight.
        """
        name = None if path is None else _Name(self, Path(os.path.abspath(path)), write=write, then=then)
        self._latest = None
        handle = self._checkpointer.save_as(step, state, name, metadata)
        self._latest = name
        self._handles = [each for each in self._handles if not each.done or each.error is not None] + [handle]
        return handle

    def also(self, path: Path, values: str) -> bool:
        """Give the newest save a second name, which is a file that holds `values`. False if that save has failed."""
        saved = self._latest
        if saved is None or saved.attempt is None:
            return False
        name = _Name(
            self, Path(os.path.abspath(path)), write=functools.partial(write_file, values=values), then=lambda: None
        )
        try:
            name.prepare(saved.attempt)
        except BaseException as error:
            name.withdraw(error)
            raise
        with self._lock:
            if saved.is_over and not saved.committed:
                self._in_flight.pop(name.number)
                name_files.delete(name.hidden)
                return False
            if not saved.is_over:
                saved.extra_names.append(name)
                return True
        name.publish()
        return True

    def restore(self, state: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> Record:
        """Restore the step that the name refers to, in any timeline of the run."""
        record = read_name(path)
        run = record.run or self._checkpointer.run
        try:
            self._checkpointer.restore(state, record.attempt or record.step, run=run, **options)
        except NotFoundError as error:
            raise MissingStepError(
                f"{path} names step {record.step} of run {run}, which cannot be restored: {error.message}",
                hint="resume from another name in that folder, or restore a step that `headrace ckpt ls` lists",
            ) from error
        return record

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a name after the newest save is committed. Only the run's retention removes the step."""
        place = Path(os.path.abspath(path))
        with self._lock:
            if self._published < self._begun:
                self._to_remove.append((self._begun, place))
                return
        name_files.remove(place)

    def remove_now(self, path: str | os.PathLike[str]) -> None:
        """Remove a name immediately. For callbacks that run after a name is published. A failure is logged."""
        with _logging(f"the name {path} could not be removed"):
            name_files.remove(Path(path))

    def wait(self) -> None:
        """Wait until no save is in flight. Raises the error of a failed save, unless it was raised before."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        for handle in handles:
            if not handle.fetched:
                handle.result()

    def wait_quietly(self) -> None:
        """Wait until no save is in flight. Raises no errors, because the checkpointer reports them."""
        for handle in self._handles:
            handle.wait()

    def recover(self, folder: str | os.PathLike[str], only: str | None = None) -> None:
        """Publish the hidden names that dead processes left and whose attempts are committed, oldest first.

        A name that cannot be published now is logged and stays hidden. `only`: recover only this name.
        """
        place = Path(os.path.abspath(folder))
        recoverable: list[tuple[int, int, Path, str, Record]] = []
        with _logging(f"the hidden names in {place} could not be read"):
            recoverable = sorted(self._recoverable(place, only), key=lambda each: each[:3])
        for *_, hidden, name, record in recoverable:
            with _logging(f"the name {hidden.parent / name} could not be published"):
                self._recover_one(hidden, hidden.parent / name, record)

    def _recoverable(self, folder: Path, only: str | None) -> Iterator[tuple[int, int, Path, str, Record]]:
        for hidden, name, kind in name_files.hidden_names(folder):
            if only is not None and name != only:
                continue
            if kind == "replaced":
                name_files.delete(hidden)
                continue
            # a hidden name without a readable record stays
            with contextlib.suppress(CorruptionError, MissingStepError):
                record = read_name(hidden)
                if record.attempt is not None and not self._is_in_use(hidden):
                    yield record.attempt.timeline, record.step, hidden, name, record

    def _is_in_use(self, hidden: Path) -> bool:
        with self._lock:
            return hidden in self._unpublished or any(each.hidden == hidden for each in self._in_flight.values())

    def _recover_one(self, hidden: Path, path: Path, record: Record) -> None:
        assert record.attempt is not None
        if self._checkpointer.is_committed(record.run, record.attempt):
            with contextlib.suppress(MissingStepError, CorruptionError):
                published = read_name(path).attempt
                if published is not None and (published.timeline, published.step) > (
                    record.attempt.timeline,
                    record.step,
                ):
                    name_files.delete(hidden)
                    return
            name_files.install(hidden, path)
            _log.warning("%s: published the name of step %d, whose saver died after the commit", path, record.step)
        elif self._checkpointer.is_over(record.run, record.attempt):
            name_files.delete(hidden)

    # called in the threads of the saves

    def _begin(self, name: _Name) -> int:
        with self._lock:
            self._begun = next(self._numbers)
            self._in_flight[self._begun] = name
            expired, self._unpublished = self._unpublished[:-_KEPT_UNPUBLISHED], self._unpublished[-_KEPT_UNPUBLISHED:]
        for hidden in expired:
            name_files.delete(hidden)
        return self._begun

    def _publish(self, name: _Name) -> None:
        with self._lock:
            newest = self._newest.get(name.path, 0)
            if newest > name.number:
                name_files.delete(name.hidden)
            else:
                self._newest[name.path] = name.number
                name_files.install(name.hidden, name.path)
            self._published = max(self._published, name.number)
            due = [path for number, path in self._to_remove if number <= self._published]
            self._to_remove = [pair for pair in self._to_remove if pair[0] > self._published]
            self._in_flight.pop(name.number)
            self._newest = {p: n for p, n in self._newest.items() if any(n > m for m in self._in_flight)}
            in_flight = {other.path: other for other in self._in_flight.values()}
            name.is_over = True
        _named()
        for extra in name.extra_names:
            self._publish_extra(extra)
        for path in due:
            if path in in_flight:  # a save in flight publishes it, so remove it after that
                in_flight[path].remove_after_publish.append(path)
            else:
                self.remove_now(path)
        for path in name.remove_after_publish:
            self.remove_now(path)
        with _logging(f"the callback after publishing {name.path} failed"):
            name.then()

    def _publish_extra(self, name: _Name) -> None:
        with _logging(f"the name {name.path} could not be published"):
            try:
                name.publish()
            except BaseException as error:
                name.withdraw(error)
                raise

    def _withdraw(self, name: _Name, error: BaseException) -> None:
        with self._lock:
            self._in_flight.pop(name.number, None)
            name.is_over = True
            may_be_committed = name.committed or (
                isinstance(error, TransientError) and not isinstance(error, FinalError)
            )
            if may_be_committed:
                self._unpublished.append(name.hidden)
        if not may_be_committed:
            name_files.delete(name.hidden)
        for extra in name.extra_names:
            extra.withdraw(error)


class _Name:
    """The name of one save. It implements `headrace.checkpoint.handle.Name`."""

    def __init__(
        self, owner: Names, path: Path, *, write: Callable[[Path, Record], None], then: Callable[[], None]
    ) -> None:
        self._owner, self.path, self._write, self.then = owner, path, write, then
        self.hidden, self.number = path, 0
        self.remove_after_publish: list[Path] = []
        self.extra_names: list[_Name] = []
        self.attempt: Base | None = None
        self.committed = self.is_over = False

    def prepare(self, attempt: Base) -> None:
        self.attempt = attempt
        self.hidden = name_files.hidden_path(self.path, attempt.attempt)
        self.number = self._owner._begin(self)
        with self._failing("begun"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(self.hidden, Record(attempt.step, self._owner._checkpointer.run, attempt))
            name_files.sync(self.hidden)
            name_files.sync_folder(self.path.parent)
        _hidden()

    def publish(self) -> None:
        self.committed = True
        _committed()
        with self._failing("committed"):
            self._owner._publish(self)

    def withdraw(self, error: BaseException) -> None:
        if self.number:
            self._owner._withdraw(self, error)

    @contextlib.contextmanager
    def _failing(self, how_far: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            step = -1 if self.attempt is None else self.attempt.step
            raise UsageError(
                f"step {step} is {how_far}, but its name {self.path} cannot be written: {error}",
                hint="check that folder; the next save writes its own name",
            ) from error


@contextlib.contextmanager
def _logging(problem: str) -> Iterator[None]:
    """Log an error of the body instead of raising it."""
    try:
        yield
    except Exception as error:
        _log.error("%s: %s", problem, error, exc_info=None if isinstance(error, HeadraceError | OSError) else error)
