"""Names of steps: the files and folders in which a framework finds the checkpoint to resume from.

A framework resumes from a file or folder that it finds (`last.ckpt`, `checkpoint-1200`). Such a name must never refer
to a step that is not committed. A save therefore handles its name in this order:

1. It writes a hidden name (`.checkpoint-1200.<attempt>.uncommitted`), with a record of its attempt.
2. After the attempt is committed, it renames the hidden name.
3. It then removes older names.

A process that is killed between these steps leaves a hidden name. The next process publishes it if the attempt was
committed, and deletes it if the attempt can never be committed (`Names.recover`).

Invariant: a name refers to a committed attempt. Files and folders are fsynced before they are renamed, and their parent
folder afterwards. A name that is used again is replaced. An earlier save never replaces the name of a later one.

Failure behaviour: a save whose name cannot be written fails with `UsageError`, although the step may be committed.
Later failures (another name of the step, removing old names) are logged. `recover` logs a name that it cannot publish
and leaves it hidden. It does not raise, because the other ranks wait for this rank. `MissingStepError` is a
`NotFoundError` and a `FileNotFoundError`. `CorruptionError` is raised for a file that is not a Headrace name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoint.api import Checkpointer
from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.handle import Handle
from headrace.checkpoint.repository.commit import FinalError
from headrace.checkpoint.repository.steps import MissingStepError
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError, TransientError, UsageError
from headrace.dataio.core.log import get_logger

RECORD = "headrace-step.json"
"""If a name is a folder, this file in it holds the record. If a name is a file, it holds the same JSON itself."""
MAX_BYTES = 4 << 20
"""The largest record, in bytes."""
_HIDDEN = re.compile(r"\.(.+)\.([0-9A-Z]{26})\.(uncommitted|replaced)$")
_KEPT_UNPUBLISHED = 2
"""The number of names of failed saves that are kept, because a sidecar may still commit them."""
_log = get_logger(__name__)

_hidden = declare("name.hidden", "the attempt has an id and a hidden name; no object of it is stored")
_committed = declare("name.committed", "the step is committed; its name is hidden")
_replaced = declare(
    "name.replaced", "the step is committed; the name's earlier folder is moved away, the new one hidden"
)
_named = declare("name.named", "the step has its name; older names still exist")
_removed = declare("name.removed", "an older name is hidden from the framework and about to be deleted")


class _Fields(msgspec.Struct, omit_defaults=True, rename={"step": "headrace-step"}):
    """A record as JSON. The first version of the format had only the step."""

    step: int
    run: str = ""
    timeline: int = 0
    attempt: str = ""
    values: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """The step that a name refers to. `values` holds further data of the adapter.

    In names of the format's first version, `attempt` is None and `run` is "".
    """

    step: int
    run: str = ""
    attempt: Base | None = None
    values: str = ""

    def encode(self) -> bytes:
        at = self.attempt or Base(0, self.step, "")
        return msgspec.json.encode(_Fields(self.step, self.run, at.timeline, at.attempt, self.values)) + b"\n"


def read_name(path: str | os.PathLike[str]) -> Record:
    """The record of a name, which is a file or a folder."""
    place = Path(path)
    folder = place.is_dir()
    try:
        with open(place / RECORD if folder else place, "rb") as file:  # a file of other software may have any size
            return _decode(file.read(MAX_BYTES))
    except FileNotFoundError:
        if folder:
            return Record(step_of(place))
        raise MissingStepError(f"there is no checkpoint named {place}", hint="check the path") from None
    except (msgspec.MsgspecError, UsageError, OSError, RecursionError):
        raise CorruptionError(
            f"{place} does not name a step of a Headrace repository", hint="other software may have saved it"
        ) from None


def _decode(data: bytes) -> Record:
    fields = msgspec.json.decode(data, type=_Fields)
    step = names.check_step(fields.step)
    if not fields.attempt:
        return Record(step)
    attempt = Base(fields.timeline, step, names.check_id(fields.attempt))
    return Record(step, names.check_run(fields.run), attempt, fields.values)


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
    ) -> Handle:
        """Begin to save `state`. After the save is committed, `path` becomes its name.

        All ranks call it. Ranks that create no name pass None as `path`.

        Args:
            step (int): The step's number.
            state (dict[str, Any]): The state, as for `Checkpointer.save`.
            path (Path | None): The file or folder that names the step.
            write (Callable[[Path, Record], None]): Writes the hidden file or folder.
            then (Callable[[], None]): Called after the name is published.

        Returns:
            Handle: The save in flight.
        """
        name = None if path is None else _Name(self, Path(os.path.abspath(path)), write=write, then=then)
        self._latest = None
        handle = self._checkpointer.save_as(step, state, name)
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
                _delete(name.hidden)
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
        _remove(place)

    def remove_now(self, path: str | os.PathLike[str]) -> None:
        """Remove a name immediately. For callbacks that run after a name is published. A failure is logged."""
        with _logging(f"the name {path} could not be removed"):
            _remove(Path(path))

    def wait(self) -> None:
        """Wait until no save is in flight. Raises the error of a failed save, unless it was raised before."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        for handle in handles:
            if not handle.fetched:
                handle.result()

    def settle(self) -> None:
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
        for hidden, name, kind in _hidden_names(folder):
            if only is not None and name != only:
                continue
            if kind == "replaced":
                _delete(hidden)
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
                    _delete(hidden)
                    return
            _install(hidden, path)
            _log.warning("%s: published the name of step %d, whose saver died after the commit", path, record.step)
        elif self._checkpointer.is_over(record.run, record.attempt):
            _delete(hidden)

    # called in the threads of the saves

    def _begin(self, name: _Name) -> int:
        with self._lock:
            self._begun = next(self._numbers)
            self._in_flight[self._begun] = name
            expired, self._unpublished = self._unpublished[:-_KEPT_UNPUBLISHED], self._unpublished[-_KEPT_UNPUBLISHED:]
        for hidden in expired:
            _delete(hidden)
        return self._begun

    def _publish(self, name: _Name) -> None:
        with self._lock:
            newest = self._newest.get(name.path, 0)
            if newest > name.number:
                _delete(name.hidden)
            else:
                self._newest[name.path] = name.number
                _install(name.hidden, name.path)
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
            _delete(name.hidden)
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
        self.hidden = self.path.with_name(f".{self.path.name}.{attempt.attempt}.uncommitted")
        self.number = self._owner._begin(self)
        with self._failing("begun"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(self.hidden, Record(attempt.step, self._owner._checkpointer.run, attempt))
            _sync(self.hidden)
            _sync_folder(self.path.parent)
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


def write_file(hidden: Path, record: Record, values: str = "") -> None:
    """Write a name that is a file."""
    hidden.write_bytes(dataclasses.replace(record, values=values).encode())


def move_folder(folder: Path) -> Callable[[Path, Record], None]:
    """Write a name that is a folder. The caller has already filled the folder."""

    def write(hidden: Path, record: Record) -> None:
        (folder / RECORD).write_bytes(record.encode())
        os.rename(folder, hidden)

    return write


def _hidden_names(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """(path, name, kind) of every hidden name in the folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in sorted(os.listdir(folder)):
            if (match := _HIDDEN.match(entry)) is not None:
                yield folder / entry, match[1], match[3]


def _install(hidden: Path, path: Path) -> None:
    """Rename a hidden name to `path`."""
    attempt = read_name(hidden).attempt if hidden.exists() else None
    if attempt is None:  # another process has already recovered it
        if not path.exists():
            raise FileNotFoundError(f"neither {hidden} nor {path} exists")
        return
    if not hidden.is_dir():
        os.replace(hidden, path)
        _sync_folder(path.parent)
        return
    replaced = path.with_name(f".{path.name}.{attempt.attempt}.replaced")
    if os.path.lexists(path):
        os.rename(path, replaced)
        _replaced()
    os.rename(hidden, path)
    _sync_folder(path.parent)
    _delete(replaced)


def _remove(path: Path) -> None:
    """Remove a name.

    A folder is hidden first, because a framework would treat a partly removed folder as a checkpoint.
    """
    if path.is_dir() and not path.is_symlink():
        replaced = path.with_name(f".{path.name}.{'0' * 26}.replaced")
        _delete(replaced)
        os.rename(path, replaced)
        _removed()
        _delete(replaced)
    else:
        path.unlink(missing_ok=True)
        _removed()


def _delete(path: Path) -> None:
    """Delete a hidden name. If this fails, it stays hidden."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Call fsync on a file, or on a folder and everything in it."""
    if not path.is_dir():
        _sync_one(path)
        return
    for folder, _, files in os.walk(path):
        for file in files:
            _sync_one(Path(folder) / file)
        _sync_folder(Path(folder))


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_sync_folder = _sync_one
