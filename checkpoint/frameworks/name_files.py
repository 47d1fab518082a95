"""The files and folders that name steps: their record, and how one is hidden, renamed and removed.

A hidden name (`.checkpoint-1200.<attempt>.uncommitted`) is invisible to frameworks. Renaming it publishes it.

Invariant: the caller fsyncs a hidden name (`sync`) before `install` renames it. `install` then fsyncs the parent folder.
A folder that is replaced or removed is hidden first, so a framework never finds a part of one.

Failure behaviour: `CorruptionError` for a file that is not a Headrace name. `MissingStepError` if there is no file or
folder. Errors of the file system are raised, except if a hidden name cannot be deleted: it then stays hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository.steps import MissingStepError
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import CorruptionError, UsageError

RECORD = "headrace-step.json"
"""If a name is a folder, this file in it holds the record. If a name is a file, it holds the same JSON itself."""
MAX_BYTES = 4 << 20
"""The largest record, in bytes."""
_HIDDEN = re.compile(r"\.(.+)\.([0-9A-Z]{26})\.(uncommitted|replaced)$")

_replaced = declare(
    "name.replaced", "the step is committed; the name's earlier folder is moved away, the new one hidden"
)
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


def write_file(hidden: Path, record: Record, values: str = "") -> None:
    """Write a name that is a file."""
    hidden.write_bytes(dataclasses.replace(record, values=values).encode())


def replace_file(path: Path, record: Record) -> None:
    """Make the file `path` the name of a committed step. Several processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, written = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.close(fd)
        write_file(Path(written), record)
        sync(Path(written))
        os.replace(written, path)
    finally:
        Path(written).unlink(missing_ok=True)
    sync_folder(path.parent)


def move_folder(folder: Path) -> Callable[[Path, Record], None]:
    """Write a name that is a folder. The caller has already filled the folder."""

    def write(hidden: Path, record: Record) -> None:
        (folder / RECORD).write_bytes(record.encode())
        os.rename(folder, hidden)

    return write


def hidden_path(path: Path, attempt: str) -> Path:
    """The hidden name of an attempt that shall become `path`."""
    return path.with_name(f".{path.name}.{attempt}.uncommitted")


def hidden_names(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """(path, name, kind) of every hidden name in the folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in sorted(os.listdir(folder)):
            if (match := _HIDDEN.match(entry)) is not None:
                yield folder / entry, match[1], match[3]


def install(hidden: Path, path: Path) -> None:
    """Rename a hidden name to `path`."""
    attempt = read_name(hidden).attempt if hidden.exists() else None
    if attempt is None:  # another process has already recovered it
        if not path.exists():
            raise FileNotFoundError(f"neither {hidden} nor {path} exists")
        return
    if not hidden.is_dir():
        os.replace(hidden, path)
        sync_folder(path.parent)
        return
    replaced = path.with_name(f".{path.name}.{attempt.attempt}.replaced")
    if os.path.lexists(path):
        os.rename(path, replaced)
        _replaced()
    os.rename(hidden, path)
    sync_folder(path.parent)
    delete(replaced)


def remove(path: Path) -> None:
    """Remove a name.

    A folder is hidden first, because a framework would treat a partly removed folder as a checkpoint.
    """
    if path.is_dir() and not path.is_symlink():
        replaced = path.with_name(f".{path.name}.{'0' * 26}.replaced")
        delete(replaced)
        os.rename(path, replaced)
        _removed()
        delete(replaced)
    else:
        path.unlink(missing_ok=True)
        _removed()


def delete(path: Path) -> None:
    """Delete a hidden name. If this fails, it stays hidden."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Call fsync on a file, or on a folder and everything in it."""
    if not path.is_dir():
        _sync_one(path)
        return
    for folder, _, files in os.walk(path):
        for file in files:
            _sync_one(Path(folder) / file)
        sync_folder(Path(folder))


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


sync_folder = _sync_one
