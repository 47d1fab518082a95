"""The results of a benchmark: one JSON document for each run, in the same format for all benchmarks.

A `Run` has the machine, the command line and its `Part`s. A part (one benchmark) has `Metric`s (what is measured, its unit, which
direction is better, the physical limit) and the `Samples` of each candidate: all raw samples, and the errors.
Invariant: samples are stored as they were measured, medians are never stored. A part that failed, was interrupted or was left out
is in the document with its `status` and `why`. Documents of a newer format are refused.
Failure behaviour: a file that is no such document is a `UsageError` that names the file and the field.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, Literal

import msgspec

from headrace.dataio.core.errors import UsageError, translate_os_errors
from headrace.dataio.core.files import is_special, write_output
from headrace.dataio.core.limits import MIB, format_bytes

FORMAT = "headrace-bench"
VERSION = 1
MAX_BYTES = 64 * MIB

Status = Literal["done", "failed", "interrupted", "skipped"]
Better = Literal["higher", "lower"]


class Metric(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is measured. `title` heads a column; `unit` is that of the samples.

    `limit` is what the hardware allows (`limit_why` says how it was found: measured in the same run, or a data sheet),
    `goal` what we want of it. `axes` places the metric in a sweep (`{"operation": "get", "size": 262144, "concurrency":
    4}`), so that a report can draw metrics of equal `quantity` as one curve. `group` is the part of the title that its
    neighbour in a table already shows ("first save"); a chart shows both.
    """

    title: str
    unit: str
    better: Better = "lower"
    goal: float | None = None
    limit: float | None = None
    limit_why: str = ""
    quantity: str = ""
    axes: dict[str, str | float] = {}
    group: str = ""


class Samples(msgspec.Struct, omit_defaults=True):
    """All raw samples of one candidate, metric by metric, and the errors of the rounds that failed.

    `histograms` are latency distributions over all rounds, by name: pairs of (upper edge of a bucket in seconds, how many).
    """

    metrics: dict[str, list[float]] = {}
    errors: list[str] = []
    histograms: dict[str, list[tuple[float, int]]] = {}


class Part(msgspec.Struct, omit_defaults=True):
    """One benchmark of a run. The first candidate is ours; `against` names the one that ratios are taken to."""

    name: str
    title: str = ""
    status: Status = "done"
    why: str = ""
    seconds: float = 0.0
    settings: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}
    candidates: dict[str, Samples] = {}
    against: str = ""
    notes: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether the part or one of its candidates did not end as it should."""
        return self.status in ("failed", "interrupted") or any(found.errors for found in self.candidates.values())


class Run(msgspec.Struct, omit_defaults=True):
    """One start of `headrace bench`. `started` is UTC, ISO 8601."""

    command: list[str]
    started: str
    environment: dict[str, Any]
    parts: list[Part] = []
    format: str = FORMAT
    version: int = VERSION


def shown(words: Iterable[str]) -> list[str]:
    """A command line without the folders of this machine: only the last part of each path is kept."""
    found = []
    for word in words:
        name, equals, path = word.partition("=") if word.startswith("-") or "=/" in word else ("", "", word)
        local = path.startswith(("/", "file:///"))
        found.append(f"{name}{equals}…/{PurePath(path).name}" if local else word)
    return found


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


_ENCODER = msgspec.json.Encoder()


def encode(run: Run) -> str:
    """The document as text, indented by one space, with the format's name in it."""
    known = msgspec.to_builtins(run) | {"format": run.format, "version": run.version}
    return msgspec.json.format(_ENCODER.encode(known), indent=1).decode()


def prepare(path: Path) -> None:
    """Check before the measurement that `path` can be written."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="name a file for the results")
    if is_special(path):
        return
    with translate_os_errors(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.touch()
        partial.unlink()


def write(run: Run, path: Path) -> None:
    """Write the document to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_output(path) as file:
        file.write(f"{encode(run)}\n".encode())


def read(path: Path) -> Run:
    """The document in `path`; `UsageError` when it is none, too large, or of a newer format."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not path.is_dir():  # reading it might never end
            raise UsageError(f"{path} is no regular file", hint="give what `headrace bench … -o FILE` wrote")
        if found.st_size > MAX_BYTES:
            raise UsageError(
                f"{path} has {format_bytes(found.st_size)}, results have at most {format_bytes(MAX_BYTES)}"
            )
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def decode(data: bytes, name: str) -> Run:
    """The document in `data`; `name` is for errors."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise UsageError(f"{name} holds no results of `headrace bench`", hint="give what its -o wrote")
        if head.version > VERSION:
            raise UsageError(
                f"{name} has format {head.version}, this program knows up to {VERSION}", hint="update Headrace"
            )
        return msgspec.json.decode(data, type=Run)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{name} holds no results of `headrace bench`: {error}", hint="give what its -o wrote"
        ) from None
