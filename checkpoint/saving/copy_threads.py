"""The threads that copy a state in main memory, and a measurement of how fast this machine copies.

Large copies are fastest with non-temporal stores, which bypass the caches. The C library glibc uses them from a
threshold that it derives from the last-level cache: a few MiB on most machines. On a virtual machine that reports its
host's whole cache, the threshold may exceed every piece of a state. Only the environment at the start of a process
changes it (`TUNABLE`). `headrace doctor --memory` starts `python -m headrace.checkpoint.saving.copy_threads`, which
measures copies with and without the setting and advises on it.
Invariant: the program measures the same copies that staging makes, alternately in processes with and without the
setting. It leaves no files.
Failure behaviour: without enough memory the program ends with the exit code of `CapacityError`. On C libraries other
than glibc the setting does nothing, and the program does not advise it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from headrace.dataio.core.errors import CapacityError, HeadraceError, TransientError
from headrace.dataio.core.limits import MIB
from headrace.dataio.core.programs import run_module

PIECE = 16 * MIB
"""Bytes that a thread copies at once."""
LATE = 2
"""Threads that copy during training (lazy staging). Training needs the other cores."""
_MOST = 8
TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
SETTING = f"{TUNABLE}=0x100000"
"""1 MiB: the threshold that glibc itself derives if a core has 1.33 MiB of the last-level cache."""
VARIABLE = "GLIBC_TUNABLES"
_WORTH = 0.85
"""The setting is advised only if copies take less than this fraction of the time."""
_BYTES, _ROUNDS, _PROCESSES, _SECONDS = 256 * MIB, 5, 2, 60


class CopyPool(ThreadPoolExecutor):
    """A pool of `size` threads that copy a state."""

    def __init__(self, size: int) -> None:
        super().__init__(size, thread_name_prefix="headrace-stage")
        self.size = size


def threads(cores: int, ranks_on_node: int) -> int:
    """Number of threads with which a rank copies while its trainer waits. This is a pure function.

    It is the rank's share of the node's cores, at most eight.
    More threads gain nothing, because memory bandwidth is the limit.
    """
    return min(max(cores // max(ranks_on_node, 1), 1), _MOST)


def num_copy_threads() -> int:
    """`threads` for this process. Launchers such as torchrun give the node's ranks in `LOCAL_WORLD_SIZE`."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return threads(len(os.sched_getaffinity(0)), int(ranks) if ranks.isdecimal() else 1)


def streaming(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which copies from 1 MiB on bypass the caches.

    A threshold that is already set stays. This is a pure function.
    """
    tunables = environment.get(VARIABLE, "")
    if TUNABLE in tunables:
        return dict(environment)
    return {**environment, VARIABLE: f"{tunables}:{SETTING}" if tunables else SETTING}


def advice(as_it_is: float, streamed: float, environment: Mapping[str, str]) -> str:
    """The advice, from the seconds that a copy takes without and with the setting; "" if the gain is too small.

    This is a pure function.
    """
    if streamed >= _WORTH * as_it_is:
        return ""
    value = streaming(environment)[VARIABLE]
    return (
        f"start trainers whose state is in main memory with {VARIABLE}={value}: "
        f"eager staging then copies it in {streamed / as_it_is:.2f} of the time"
    )


def measure(size: int = _BYTES, rounds: int = _ROUNDS) -> float:
    """Median seconds in which this process copies `size` bytes into shared memory, in the same way as staging."""
    count = num_copy_threads()
    try:
        source, target = np.ones(size, np.uint8), np.frombuffer(mmap.mmap(-1, size), np.uint8)
    except (MemoryError, OSError) as error:
        raise CapacityError(f"no memory for two times {size} bytes: {error}") from error
    target.fill(0)  # fault in the pages here, not in the measured copy

    def copy_piece(at: int) -> None:
        np.copyto(target[at : at + PIECE], source[at : at + PIECE])

    seconds = []
    with CopyPool(count) as pool:
        for _ in range(rounds):
            began = time.perf_counter()
            list(pool.map(copy_piece, range(0, size, PIECE)))
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """The program that the module's docstring describes."""
    parser = argparse.ArgumentParser(
        prog="headrace doctor --memory", description="Measure copies as staging makes them."
    )
    parser.add_argument("--json", action="store_true", help="report as one JSON object")
    parser.add_argument("--once", action="store_true", help="measure this process only")
    options = parser.parse_args(argv)
    if options.once:
        sys.stdout.write(f"{measure()}\n")
        return 0
    try:
        sys.stdout.write(f"{_report(options.json)}\n")
    except HeadraceError as error:
        sys.stderr.write(f"headrace doctor: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _report(as_json: bool) -> str:
    measured: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_PROCESSES):
        for with_it in measured:
            measured[with_it].append(_measure_in_process(streaming(os.environ) if with_it else dict(os.environ)))
    plain, streamed = (min(measured[with_it]) * 2**30 / _BYTES for with_it in (False, True))
    advised = advice(plain, streamed, os.environ)
    if as_json:
        return json.dumps(
            {"threads": num_copy_threads(), "seconds_per_gib": plain, "with": streamed, "advice": advised}
        )
    return "\n".join(
        [
            f"copies into the staging arena, {num_copy_threads()} threads, pieces of {PIECE // MIB} MiB",
            f"  as it is                            {plain * 1000:8.0f} ms for a GiB",
            f"  past the caches from 1 MiB on       {streamed * 1000:8.0f} ms for a GiB",
            f"next: {advised}" if advised else "verdict: as fast as the machine allows",
        ]
    )


def _measure_in_process(environment: dict[str, str]) -> float:
    command = run_module("headrace.checkpoint.saving.copy_threads", "--once")
    try:
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise TransientError(f"copying {_BYTES // MIB} MiB a few times took more than {_SECONDS} s") from None
    if completed.returncode:
        raise CapacityError(f"copies could not be measured: {completed.stderr.strip()[-300:]}")
    return float(completed.stdout)


if __name__ == "__main__":
    sys.exit(main())
