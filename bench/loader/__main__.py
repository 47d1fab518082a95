"""One candidate, measured in a process of its own: `python -m bench.loader CANDIDATE FOLDER KIND` prints a JSON object."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from bench.core.measure import Meter
from bench.loader import by_hand, data
from bench.loader.candidates import batches


class TreeMemory:
    """The most that this process and its children held at once, by proportional set size, looked at four times a second."""

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """MiB."""
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
    """KiB; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def measure(candidate: str, folder: Path, kind: data.Kind) -> dict[str, float]:
    """Figures of one epoch of one candidate."""
    torch.set_num_threads(1)
    memory, meter = TreeMemory(), Meter()
    begun = time.perf_counter()
    samples, first = 0, 0.0
    for video in batches(candidate, folder, kind):
        first = first or time.perf_counter() - begun
        if video.shape[1:] != (by_hand.FRAMES, 3, kind.size, kind.size) or video.dtype != torch.uint8:
            raise AssertionError(f"{candidate} delivered {tuple(video.shape)} {video.dtype}")
        samples += video.shape[0]
    peak = memory.stop()
    read = meter.read()
    expected = len(list((folder / "clips").iterdir()))
    if samples != expected:
        raise AssertionError(f"{candidate} delivered {samples} of {expected} clips")
    return {
        "samples_per_s": samples / read["wall_s"],
        "cpu_s_per_1k": 1000 * read["cpu_s"] / samples,
        "first_batch_s": first,
        "peak_mib": peak,
    }


if __name__ == "__main__":
    name, at, what = sys.argv[1:4]
    libraries = str(data.ffmpeg_libraries(Path(at)))
    if ("torchcodec" in name or "SPDL" in name) and libraries not in os.environ.get("LD_LIBRARY_PATH", ""):
        os.environ["LD_LIBRARY_PATH"] = libraries  # read when a process starts
        os.execv(sys.executable, [sys.executable, "-m", "bench.loader", *sys.argv[1:]])
    print(json.dumps(measure(name, Path(at), data.KINDS[what])))
