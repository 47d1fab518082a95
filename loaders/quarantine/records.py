"""Skipped samples, recorded on this machine for users to read.

Purpose: `headrace quarantine` lists the samples that a run's loaders skipped, and why, during the run or after it.
Needs no torch.

Invariants:
- A record is one line of JSON, appended by one write, so the ranks of a node can share a file.
- The file is in a private directory of this machine, never in the dataset. It takes at most `FILE_BYTES`.
- No run reads the records. The samples that a run trains on depend only on the dataset's version and the loader's
  state.

Failure behaviour: a loader that cannot write a record continues, and logs one warning. Readers skip and count
unreadable lines.
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


class SkippedSample(msgspec.Struct, frozen=True, kw_only=True, rename={"permanent": "for_good"}):
    """A sample that was skipped.

    Args:
        id: id of the sample in its dataset.
        key: key of the sample.
        shard: object that contains the sample.
        offset: byte offset of its first file in the shard.
        code: code of the error.
        reason: message of the error.
        permanent: True if the sample's bytes are wrong, False if one clip cannot be decoded. Stored as "for_good".
        dataset: URL of the dataset.
        source: index of the dataset in the plan.
    """

    id: int
    key: str
    shard: str
    offset: int
    code: str
    reason: str
    permanent: bool
    dataset: str = ""
    source: int = 0


class Record(msgspec.Struct, frozen=True):
    """A skipped sample, and the version of the dataset at that time."""

    skipped: SkippedSample
    version: int

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps({**msgspec.to_builtins(self.skipped), "version": self.version}, ensure_ascii=False)


def directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The directory of the records, or None if none are kept.

    It is `$HEADRACE_QUARANTINE`; the value `off` keeps no records. The default is `headrace/quarantine` in
    `$XDG_STATE_HOME` or ~/.local/state. For a user without a home directory, as in some containers, no records are
    kept.
    """
    setting = environ.get("HEADRACE_QUARANTINE")
    if setting == OFF:
        return None
    if setting:
        return Path(setting)
    try:
        state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:
        return None
    return Path(state) / "headrace" / "quarantine"


def file_of(folder: Path, dataset: str) -> Path:
    """The file with the records of the dataset at this URL."""
    return folder / f"{blake3.blake3(dataset.rstrip('/').encode()).hexdigest(8)}{_SUFFIX}"


def write(skipped: SkippedSample, version: int, folder: Path | None) -> None:
    """Append a record. Errors are logged, not raised."""
    if folder is None:
        return
    line = (Record(skipped, version).to_json() + "\n").encode()
    try:
        path = file_of(private_directory(folder), skipped.dataset)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(file).st_size + len(line) <= FILE_BYTES:
                os.write(file, line)
            else:
                warn_once(
                    _log,
                    f"{path} is full: skipped samples are no longer recorded (`headrace quarantine --clear --apply`)",
                    "node",
                )
        finally:
            os.close(file)
    except (OSError, HeadraceError) as error:
        warn_once(_log, f"skipped samples cannot be recorded: {error}", "node")


def read(folder: Path, dataset: str | None = None) -> Iterator[Record | None]:
    """Yield the records of one dataset, or of all datasets, oldest first in each file.

    None stands for an unreadable line.
    """
    paths = [file_of(folder, dataset)] if dataset is not None else sorted(folder.glob(f"*{_SUFFIX}"))
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                yield from map(_record, file.read(FILE_BYTES).splitlines())


def distinct(folder: Path, dataset: str | None = None) -> tuple[list[Record], int]:
    """One record for each sample of each version, and the number of unreadable lines.

    If a sample has several records, one of wrong bytes is preferred.
    """
    chosen: dict[tuple[str, int, str], Record] = {}
    unreadable = 0
    for record in read(folder, dataset):
        if record is None:
            unreadable += 1
            continue
        key = (record.skipped.dataset, record.version, record.skipped.key)
        if key not in chosen or (record.skipped.permanent and not chosen[key].skipped.permanent):
            chosen[key] = record
    return list(chosen.values()), unreadable


def clear(folder: Path, dataset: str | None = None) -> int:
    """Delete the records of one dataset, or of all datasets. Returns how many files were deleted."""
    paths = [file_of(folder, dataset)] if dataset is not None else list(folder.glob(f"*{_SUFFIX}"))
    existing = [path for path in paths if path.is_file()]
    for path in existing:
        path.unlink(missing_ok=True)
    return len(existing)


def _record(line: bytes) -> Record | None:
    try:
        values = json.loads(line)
        version = int(values.pop("version"))
        return Record(msgspec.convert(values, SkippedSample), version)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
