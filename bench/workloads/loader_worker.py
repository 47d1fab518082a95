"""Measure one candidate: `python -m headrace.bench.workloads.loader_worker CANDIDATE FOLDER KIND PORT`.

The process delivers one epoch and prints one JSON object. Failure behaviour: too few samples, or samples of another
shape, end the process with an error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from headrace.bench.core.measure import Meter
from headrace.bench.peers.candidates import batches
from headrace.bench.workloads import video
from headrace.bench.workloads.source import Place


class TreeMemory:
    """Peak memory of this process and its children: the sum of their PSS, sampled four times a second."""

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Stop sampling, and return the peak in MiB."""
        self._over.set()
        self._thread.join()
        return self.most / 1024

    def _watch(self) -> None:
        while True:
            over = self._over.wait(0.25)
            self.most = max(self.most, sum(_pss(pid) for pid in _tree(str(os.getpid()))))
            if over:
                return


def _tree(pid: str) -> list[str]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [below for child in task.read_text().split() for below in _tree(child)]
        except OSError:
            continue
    return found


def _pss(pid: str) -> int:
    """Return the PSS of a process in KiB, or 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def measure(candidate: str, place: Place, kind: video.AnyKind) -> dict[str, float]:
    """Measure one epoch of one candidate. `steady_per_s` excludes everything up to the first batch."""
    torch.set_num_threads(1)
    memory, sent, meter = TreeMemory(), place.sent(), Meter()
    begun = time.perf_counter()
    samples, first, before = 0, 0.0, 0
    for made in batches(candidate, place, kind):
        samples += made.shape[0]
        if not first:
            first, before = time.perf_counter() - begun, samples
        if made.shape[1:] != kind.shape or str(made.dtype) != f"torch.{kind.dtype}":
            raise AssertionError(f"{candidate} delivered {tuple(made.shape)} {made.dtype}")
        last = time.perf_counter() - begun
    read = meter.read()
    peak = memory.stop()
    expected = len(place.clips()) * kind.per_file
    if samples != expected:
        raise AssertionError(f"{candidate} delivered {samples} of {expected} clips")
    found = {
        "samples_per_s": samples / read["wall_s"],
        "steady_per_s": (samples - before) / max(1e-9, last - first),
        "cpu_s_per_1k": 1000 * read["cpu_s"] / samples,
        "first_batch_s": first,
        "peak_mib": peak,
    }
    return found | ({"read_mb": (place.sent() - sent) / 1e6} if place.port else {})


if __name__ == "__main__":
    name, at, what, port = sys.argv[1:5]
    libraries = str(video.ffmpeg_libraries(Path(at)))
    if ("torchcodec" in name or "SPDL" in name) and libraries not in os.environ.get("LD_LIBRARY_PATH", ""):
        os.environ["LD_LIBRARY_PATH"] = libraries  # the dynamic linker reads it when a process starts
        os.execv(sys.executable, [sys.executable, "-m", "headrace.bench.workloads.loader_worker", *sys.argv[1:]])
    print(json.dumps(measure(name, Place(Path(at), int(port)), video.KINDS[what])))
