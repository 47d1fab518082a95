"""A save before the machine is taken away, behind three others, at a server of a fixed bandwidth: `python -m bench.preemption`.

Purpose: what `save(priority="preemption")` is for. The floor is the same save alone; the contrast is the same save of normal
priority behind the others.
Method: a real S3 server behind a proxy that brings it `RATE` bytes a second in all; a real daemon; each way in every round,
medians.
Failure behaviour: a save that does not commit ends the run with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from checkpoint import Checkpointer, Handle
from dataio.core.limits import MIB
from dataio.sidecar.client import Sidecar
from dataio.testing.proxy import FaultProxy
from dataio.testing.s3server import start_seaweedfs

RATE = 40e6
BIG, URGENT = 256 * MIB, 128 * MIB
OTHERS = 3
WAYS = ("alone", "preemption", "normal")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.preemption", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with start_seaweedfs() as server, FaultProxy(server.endpoint, RATE) as proxy:
        server.create_bucket("bench")
        os.environ.update(server.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint})
        for number in range(options.rounds):
            for way in WAYS:
                with _daemon() as socket:
                    seconds[way].append(_measure(f"s3://bench/{number}-{way}", socket, way))
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    if options.json:
        print(json.dumps({"seconds": seconds, "medians": medians}))
        return
    print(
        f"{URGENT / MIB:.0f} MiB behind {OTHERS} saves of {BIG / MIB:.0f} MiB, {RATE / 1e6:.0f} MB/s; seconds to the commit"
    )
    for way in WAYS:
        spread = f"({min(seconds[way]):.1f}–{max(seconds[way]):.1f})"
        print(f"{way:12} {medians[way]:6.1f} {spread:14} {medians[way] / medians['alone']:5.2f} times alone")


def _measure(url: str, socket: str, way: str) -> float:
    """Seconds from `save` to the commit of the last save."""
    with contextlib.ExitStack() as stack:

        def saving(run: str) -> Checkpointer:
            return stack.enter_context(Checkpointer(url, run=run, sidecar=socket))

        others: list[Handle] = []
        for number in range(OTHERS if way != "alone" else 0):
            others.append(saving(f"big{number}").save(1, {"w": torch.randint(0, 255, (BIG,), dtype=torch.uint8)}))
            others[-1].staged(60)
        last, state = saving("last"), {"w": torch.randint(0, 255, (URGENT,), dtype=torch.uint8)}
        time.sleep(2.0)  # the others are under way
        began = time.perf_counter()
        handle = last.save(1, state, priority="preemption" if way == "preemption" else "normal")
        handle.result(600)
        spent = time.perf_counter() - began
        assert handle.carrier == "sidecar"
        for other in others:
            other.result(600)
        return spent


@contextlib.contextmanager
def _daemon() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        socket = str(Path(folder) / "sidecar.sock")
        command = [sys.executable, "-m", "dataio.cli", "sidecar", "run", "--socket", socket, "--http-port", "off"]
        process = subprocess.Popen([*command, "--cache-dir", f"{folder}/cache", "--cache-bytes", "1MiB"])
        try:
            while (found := Sidecar.find(socket)) is None:
                time.sleep(0.05)
            found.close()
            yield socket
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
