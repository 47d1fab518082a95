"""What the bytes of a first epoch take by themselves: read, digested, written and copied once, without a plan or messages.

    python -m headrace.bench.sidecar_floor JSON        (a `Copier`; one of the processes of `beside`)

Purpose: the floor that a first epoch of the sidecar is held beside, in one thread (`passing`) and with as many processes at it as
there are ranks (`beside`), which share the cores' caches and the memory with whoever writes, as ranks do.
Invariants: every byte of the dataset is read, digested, written and, but for the headers of its samples, copied once; all run on
pages that the machine has at hand. Failure behaviour: a process that fails ends the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import xxhash

from headrace.bench.sidecar_rank import Shape

BATCH = 16
BLOCK_BYTES = 4 << 20
SETTLE_SECONDS, SMALL_BYTES = 2.5, 64 << 20


class Memory:
    """Pages that this machine has at hand, `size` bytes of them, until `free` gives them to whoever writes next. A kernel that
    gives free pages back to a host does so two seconds after some became free: `free` waits until that is over for those that
    became free before."""

    def __init__(self, folder: Path, size: int) -> None:
        piece = bytes(4 << 20)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # `free` closes it
        for _ in range(0, size, len(piece)):
            self._file.write(piece)
        self._size = size

    def free(self) -> None:
        if self._size > SMALL_BYTES:
            time.sleep(SETTLE_SECONDS)
        self._file.close()


def passing(data: Path, folder: Path, shape: Shape) -> tuple[float, float]:
    """Seconds to read, digest and write all shards of `data` block by block, what a first epoch takes at least; and CPU seconds
    of that and of copying it once, sample by sample, out of mappings of what was written."""
    Memory(folder, shape.total_bytes).free()
    buffer, staging = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BATCH * shape.sample_bytes))
    staging[::4096] = bytes(len(staging[::4096]))
    taken, began = 0.0, time.process_time()
    for path in data.rglob("*.tar"):
        with tempfile.TemporaryFile(dir=folder, buffering=0) as target:
            start = time.perf_counter()
            _pass(path, target, buffer)
            taken += time.perf_counter() - start
            mapped = memoryview(mmap.mmap(target.fileno(), 0, prot=mmap.PROT_READ))
            for at in range(0, len(mapped), shape.sample_bytes):
                place = at % len(staging)
                staging[place : place + shape.sample_bytes] = mapped[at : at + shape.sample_bytes]
    return taken, time.process_time() - began


def _pass(path: Path, target: IO[bytes], buffer: memoryview) -> None:
    with path.open("rb", buffering=0) as source:
        while got := source.readinto(buffer):
            xxhash.xxh3_64_intdigest(buffer[:got])
            target.write(buffer[:got])


@dataclass(frozen=True)
class Copier:
    """Copies every `ranks`-th sample from the `rank`-th on, of each file when a byte comes for it."""

    files: list[int]
    told: int
    members: tuple[int, ...]
    per_shard: int
    rank: int
    ranks: int

    def run(self) -> float:
        """CPU seconds of it."""
        shape = Shape(1, self.per_shard, tuple(self.members))
        staging = memoryview(bytearray(BATCH * shape.sample_bytes))
        staging[::4096] = bytes(len(staging[::4096]))
        began = time.process_time()
        for file in self.files:
            if not os.read(self.told, 1):
                raise RuntimeError("the writer ended early")
            mapped = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
            at = 0
            for number, sample in enumerate(range(self.rank, shape.per_shard, self.ranks)):
                at = at if number % BATCH else 0
                for offset, size in shape.read(sample)[1]:
                    staging[at : at + size] = mapped[offset : offset + size]
                    at += size
        return time.process_time() - began


def beside(data: Path, folder: Path, shape: Shape, ranks: int) -> float:
    """CPU seconds of one thread that reads, digests and writes all shards block by block, and of `ranks` processes that copy
    them out of mappings at the same time. They are told of each shard that is written, and of nothing else."""
    paths = sorted(data.rglob("*.tar"))
    memory = Memory(folder, shape.total_bytes)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0)) for _ in paths]
        copiers = [stack.enter_context(_copier(files, shape, rank, ranks)) for rank in range(ranks)]
        memory.free()
        began = time.process_time()
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for path, target in zip(paths, files, strict=True):
            _pass(path, target, buffer)
            for copier in copiers:
                _input(copier).write(b"x")
        taken = time.process_time() - began
        return taken + sum(_answer(copier) for copier in copiers)


@contextlib.contextmanager
def _copier(files: Sequence[IO[bytes]], shape: Shape, rank: int, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    numbers = [file.fileno() for file in files]
    about = json.dumps(asdict(Copier(numbers, 0, shape.members, shape.per_shard, rank, ranks)))
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.bench.sidecar_floor", about],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        pass_fds=numbers,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _answer(process: subprocess.Popen[bytes]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def main() -> int:
    copier = Copier(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    print(copier.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
