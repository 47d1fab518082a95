"""The machine a benchmark runs on: what a reader must know to judge the figures, and the rates that it allows.

Invariant: only facts that were read in this run, none of which names a user, a host or a path. Rates are the best of three,
in bytes a second, with warm buffers. `differences` compares the hardware, not its load.
Failure behaviour: what cannot be read is left out. On a file system that refuses O_DIRECT, files are written through the
page cache and fsynced, and `Rate.why` says so.
"""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
        "s3fs",
        "boto3",
    ),
    *(
        "webdataset",
        "torchdata",
        "mosaicml-streaming",
        "litdata",
        "megatron-energon",
        "spdl",
        "torchcodec",
        "safetensors",
        "dlio-benchmark",
    ),
)
MACHINE = ("cpu", "cpus", "memory_gib", "gpu")
"""Fields that must be equal before two runs are compared as runs of one machine."""


def environment(directory: Path | None = None) -> dict[str, Any]:
    """Machine, versions, load, and the file system of `directory` (the current one by default)."""
    found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "gpu": _gpu(),
        "file_system": _file_system(directory or Path.cwd()),
        "load_before": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }
    return {name: value for name, value in found.items() if value or value == 0}  # a load of 0 is a fact, too


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What makes two machines two, in words: empty when they are the same as far as can be told."""
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
    """Type of the file system, by the longest mount point above `directory`."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    where = directory.resolve()
    above = [(len(point), kind) for point, kind in mounts if where.is_relative_to(point)]
    return max(above)[1] if above else ""


def _commit() -> str:
    """The commit of the checkout that this file is in, with `+` when tracked files differ from it."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_BLOCK = 16 << 20


@dataclass(frozen=True)
class Rate:
    """Bytes a second, and how they were measured."""

    rate: float
    why: str


def copy_rate(size: int = 128 << 20) -> Rate:
    """Copying between two warm buffers, in one thread."""
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    views = memoryview(source), memoryview(target)
    best = _best(lambda: _copy(*views))
    for view in views:
        view.release()
    return Rate(size / best, "memcpy between warm buffers, one thread, same run")


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def write_rate(folder: Path, size: int = 256 << 20) -> Rate:
    """One thread of 16 MiB writes, past the page cache where the file system allows it, then fsync."""
    path, block = folder / "floor", mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(1 << 20) * (_BLOCK >> 20))
    fd, how = _open(path, os.O_WRONLY | os.O_CREAT)
    try:
        best = _best(lambda: _write(fd, block, size))
    finally:
        os.close(fd)
        path.unlink()
    return Rate(size / best, f"one thread of 16 MiB writes ({how}) and fsync, same run")


def read_rate(folder: Path, size: int = 256 << 20) -> Rate:
    """One thread of 16 MiB reads of a file that is not in the page cache."""
    path, block = folder / "floor", mmap.mmap(-1, _BLOCK)
    with path.open("wb") as file:
        for _ in range(size // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    fd, how = _open(path, os.O_RDONLY)
    try:
        best = _best(lambda: _read(fd, block, size))
    finally:
        os.close(fd)
        path.unlink()
    return Rate(size / best, f"one thread of 16 MiB reads ({how}), same run")


def _open(path: Path, flags: int) -> tuple[int, str]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), "O_DIRECT"
    except OSError:
        return os.open(path, flags, 0o600), "through the page cache"


def _write(fd: int, block: mmap.mmap, size: int) -> None:
    for offset in range(0, size, _BLOCK):
        os.pwrite(fd, block, offset)
    os.fsync(fd)


def _read(fd: int, block: mmap.mmap, size: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset in range(0, size, _BLOCK):
        os.preadv(fd, [block], offset)


def _best(action: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)
