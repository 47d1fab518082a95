"""Refused samples, written down where a person finds them.

Purpose: `headrace quarantine` lists, after a run or during it, what its loaders left out and why. Needs no torch.
Invariants: a record is one line of JSON, appended by one write, so that the ranks of a node share a file. It lies in a
private directory of this machine, never in the dataset. Nothing reads it back into a run: what a run trains on stays a
function of the dataset's version and the loader's state. A file takes at most `FILE_BYTES`.
Failure behaviour: a loader that cannot write goes on, and says so once; a line that cannot be read is passed over and
counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.files import private_directory
from headrace.dataio.core.log import get_logger, warn_once

FILE_BYTES = 16 * limits.MIB
OFF = "off"
_SUFFIX = ".refusals.jsonl"
_log = get_logger(__name__)


class SkippedSample(msgspec.Struct, frozen=True):
    """One refused sample: its number, its key, where its bytes lie, why. `code` is that of the error.

    `for_good` tells wrong bytes from a clip that does not decode. `dataset` is the URL of the sample's dataset,
    `source` its number in the plan.
    """

    id: int
    key: str
    shard: str
    offset: int
    code: str
    reason: str
    for_good: bool
    dataset: str = ""
    source: int = 0


def directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """`$HEADRACE_QUARANTINE`, None where that is `off`; else `headrace/quarantine` in `$XDG_STATE_HOME` or
    ~/.local/state.

    None also for who has no home, as in a container for a user whom nobody entered."""
    named = environ.get("HEADRACE_QUARANTINE")
    if named == OFF:
        return None
    if named:
        return Path(named)
    try:
        state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:
        return None
    return Path(state) / "headrace" / "quarantine"


def file_of(folder: Path, dataset: str) -> Path:
    """Where the refusals of the dataset at this URL are."""
    return folder / f"{blake3.blake3(dataset.rstrip('/').encode()).hexdigest(8)}{_SUFFIX}"


def write(refusal: SkippedSample, version: int, folder: Path | None) -> None:
    """Append a record."""
    if folder is None:
        return
    line = json.dumps({**msgspec.structs.asdict(refusal), "version": version}, ensure_ascii=False) + "\n"
    try:
        path = file_of(private_directory(folder), refusal.dataset)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(file).st_size + len(line) <= FILE_BYTES:
                os.write(file, line.encode())
            else:
                warn_once(
                    _log, f"{path} is full: further refusals are not written down (`headrace quarantine --clear`)"
                )
        finally:
            os.close(file)
    except (OSError, HeadraceError) as error:
        warn_once(_log, f"refused samples are not written down: {error}")


class Record(msgspec.Struct, frozen=True):
    """A refusal as it was written, and the dataset's version then."""

    refusal: SkippedSample
    version: int


def read(folder: Path, dataset: str | None = None) -> Iterator[Record | None]:
    """What was written of one dataset, or of all, oldest first; None for a line that cannot be read."""
    paths = [file_of(folder, dataset)] if dataset is not None else sorted(folder.glob(f"*{_SUFFIX}"))
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                yield from map(_record, file.read(FILE_BYTES).splitlines())


def distinct(folder: Path, dataset: str | None = None) -> tuple[list[Record], int]:
    """As `read`, each sample of each version once, what is for good before what is not; and how many lines were
    unreadable."""
    found: dict[tuple[str, int, str], Record] = {}
    unreadable = 0
    for record in read(folder, dataset):
        if record is None:
            unreadable += 1
            continue
        which = (record.refusal.dataset, record.version, record.refusal.key)
        if which not in found or (record.refusal.for_good and not found[which].refusal.for_good):
            found[which] = record
    return list(found.values()), unreadable


def clear(folder: Path, dataset: str | None = None) -> int:
    """Forget what was written of one dataset, or of all; how many files are gone."""
    paths = [file_of(folder, dataset)] if dataset is not None else list(folder.glob(f"*{_SUFFIX}"))
    there = [path for path in paths if path.is_file()]
    for path in there:
        path.unlink(missing_ok=True)
    return len(there)


def _record(line: bytes) -> Record | None:
    try:
        values = json.loads(line)
        version = int(values.pop("version"))
        refusal = SkippedSample(**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    kinds = {"id": int, "key": str, "shard": str, "offset": int, "code": str, "reason": str, "dataset": str}
    return Record(refusal, version) if all(isinstance(getattr(refusal, n), k) for n, k in kinds.items()) else None
