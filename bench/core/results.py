"""The results of a benchmark: one JSON document for each run, in the same format for all benchmarks.

A `Run` has the machine, the command line and its `Part`s. A part is one benchmark. It has `Metric`s (a quantity, its
unit, which direction is better, the physical limit), and the `Samples` of each candidate: all raw samples, and the
errors. `environment` describes the machine.

Invariants:

- Samples are stored as they were measured. Medians are never stored.
- A part that failed, was interrupted or was skipped is in the document with its `status` and `why`.
- Documents of a newer format are refused.
- The description of the machine has only facts that were read in this run. It names no user, host or path.

Failure behaviour: a file that is not such a document is a `UsageError` that names the file and the field. Facts about
the machine that cannot be read are left out.
"""

from __future__ import annotations

import os
import platform
import stat
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
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
    """A measured quantity. `title` is the heading of its column, and `unit` the unit of its samples.

    `limit` is the best value that the hardware allows. `limit_why` names its source: a measurement of the same run,
    or a data sheet. `goal` is the value that we want to reach. `axes` is the metric's position in a sweep
    (`{"operation": "get", "size": 262144, "concurrency": 4}`), so that a report can draw metrics of equal `quantity`
    as one curve. `group` is a part of the title that a table shows only once for neighbouring columns ("first save").
    A chart shows both.
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

    `histograms` are latency distributions over all rounds, by name: pairs of (upper edge of a bucket in seconds,
    count).
    """

    metrics: dict[str, list[float]] = {}
    errors: list[str] = []
    histograms: dict[str, list[tuple[float, int]]] = {}


class Part(msgspec.Struct, omit_defaults=True):
    """One benchmark of a run. The first candidate is ours. `against` names the candidate that ratios refer to."""

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
        """Whether the part or one of its candidates failed."""
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
    """Return a command line without the folders of this machine. Only the last component of each path is kept."""
    texts = []
    for word in words:
        name, equals, path = word.partition("=") if word.startswith("-") or "=/" in word else ("", "", word)
        local = path.startswith(("/", "file:///"))
        texts.append(f"{name}{equals}…/{PurePath(path).name}" if local else word)
    return texts


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


_ENCODER = msgspec.json.Encoder()


def encode(run: Run) -> str:
    """Return the document as text, indented by one space, with the format's name in it."""
    document = msgspec.to_builtins(run) | {"format": run.format, "version": run.version}
    return msgspec.json.format(_ENCODER.encode(document), indent=1).decode()


def prepare(path: Path) -> None:
    """Check that `path` can be written, before the measurement begins."""
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
    """Write the document to `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_output(path) as file:
        file.write(f"{encode(run)}\n".encode())


def read(path: Path) -> Run:
    """Read the document in `path`. Raises `UsageError` if it is not one, too large, or of a newer format."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not path.is_dir():  # reading it might never end
            raise UsageError(f"{path} is not a regular file", hint="give a file that `headrace bench … -o FILE` wrote")
        if status.st_size > MAX_BYTES:
            raise UsageError(
                f"{path} has {format_bytes(status.st_size)}, results have at most {format_bytes(MAX_BYTES)}"
            )
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def decode(data: bytes, name: str) -> Run:
    """Decode the document in `data`. Errors use `name` for it."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise UsageError(f"{name} holds no results of `headrace bench`", hint="give a file that its -o wrote")
        if head.version > VERSION:
            raise UsageError(
                f"{name} has format {head.version}, this program knows up to {VERSION}", hint="update Headrace"
            )
        return msgspec.json.decode(data, type=Run)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{name} holds no results of `headrace bench`: {error}", hint="give a file that its -o wrote"
        ) from None


# --- the machine


_PACKAGES = (
    *(
        "headrace",
        "torch",
        "nvidia-dali-cuda130",
        "av",
        "numpy",
        "pyarrow",
        "msgspec",
        "blake3",
        "zstandard",
        "obstore",
    ),
    *("s3fs", "boto3", "webdataset", "torchdata", "mosaicml-streaming", "litdata", "megatron-energon", "spdl"),
    *("torchcodec", "safetensors", "dlio-benchmark"),
)
MACHINE = ("cpu", "cpus", "memory_gib", "gpu")
"""Fields that must be equal before two runs are compared as runs of one machine."""


def environment(directory: Path | None = None) -> dict[str, Any]:
    """Describe the machine, the versions, the load, and the file system of `directory` (default: the current one)."""
    described = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "gpu": _gpu(),
        "file_system": _file_system(directory or Path.cwd()),
        "load_before": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    return {name: value for name, value in described.items() if value or value == 0}  # a load of 0 is a fact, too


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the differences between two machines as texts; empty if none is known."""
    return [f"{name}: {ours.get(name)} / {theirs.get(name)}" for name in MACHINE if ours.get(name) != theirs.get(name)]


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _gpu() -> str:
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = file.read_text().splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return ", ".join(names)


def _file_system(directory: Path) -> str:
    """Return the type of the file system, by the longest mount point that contains `directory`."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    where = directory.resolve()
    above = [(len(point), kind) for point, kind in mounts if where.is_relative_to(point)]
    return max(above)[1] if above else ""


def _commit() -> str:
    """Return the commit of this file's checkout, with `+` if tracked files differ from it."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(where: Path, *arguments: str) -> str:
    completed = subprocess.run(
        ["git", "-C", str(where), *arguments], capture_output=True, text=True, timeout=20, check=True
    )
    return completed.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
