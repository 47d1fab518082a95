"""A save before the machine is taken away, behind three others, at a server of a fixed bandwidth.

Purpose: `headrace bench preemption` shows what `save(priority="preemption")` is for. The floor is the same save alone; the
contrast is the same save of normal priority behind the others.
Method: a real S3 server behind a proxy that brings it `RATE` bytes a second in all; a real daemon; each way in every round.
Failure behaviour: a save that does not commit ends the run with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.core import command
from headrace.bench.core.results import Metric, Part, Samples
from headrace.dataio.core.limits import MIB
from headrace.dataio.core.options import count
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.testing.proxy import FaultProxy
from headrace.dataio.testing.s3server import start_seaweedfs

if TYPE_CHECKING:
    from headrace.checkpoint import Checkpointer, Handle

RATE = 40e6
OTHERS = 3
WAYS = ("preemption", "alone", "normal")
"""What is measured comes first; `alone` is its floor, `normal` the contrast."""


METRICS = {
    "seconds": Metric("to the commit, s", "s"),
    "ratio": Metric("÷ alone, same round", "×", goal=1.5),
}


def main(argv: Sequence[str]) -> int:
    """`headrace bench preemption`."""
    about = "A save before the machine is taken away, behind three others, at a server of a fixed bandwidth."
    return command.run(argv, "preemption", about, fill, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mib", type=count, default=128, help="the urgent save; the others have twice that (default: %(default)s)"
    )


def fill(job: command.Job, part: Part) -> None:
    """Each way in every round."""
    mib = job.args.mib
    part.title = f"A last save of {mib} MiB behind {OTHERS} saves of {2 * mib} MiB, {RATE / 1e6:.0f} MB/s"
    part.settings, part.metrics, part.against = {"mib": mib, "others": OTHERS, "rate": RATE}, METRICS, "alone"
    part.candidates |= {way: Samples() for way in WAYS}
    with start_seaweedfs() as server, FaultProxy(server.endpoint, RATE) as proxy:
        server.create_bucket("bench")
        os.environ.update(server.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint})
        for number in range(job.rounds):
            seconds: dict[str, float] = {}
            for place, way in enumerate(WAYS):
                job.tell(way, (number * len(WAYS) + place) / (job.rounds * len(WAYS)))
                with _daemon() as socket:
                    seconds[way] = _measure(f"s3://bench/{number}-{way}", socket, way, mib * MIB)
            for way, took in seconds.items():
                found = part.candidates[way].metrics
                found.setdefault("seconds", []).append(took)
                found.setdefault("ratio", []).append(took / seconds["alone"])


def _measure(url: str, socket: str, way: str, size: int) -> float:
    """Seconds from `save` to the commit of the last save."""
    import torch

    from headrace.checkpoint import Checkpointer

    with contextlib.ExitStack() as stack:

        def saving(run: str) -> Checkpointer:
            return stack.enter_context(Checkpointer(url, run=run, sidecar=socket))

        others: list[Handle] = []
        for number in range(OTHERS if way != "alone" else 0):
            others.append(saving(f"big{number}").save(1, {"w": torch.randint(0, 255, (2 * size,), dtype=torch.uint8)}))
            others[-1].staged(60)
        last, state = saving("last"), {"w": torch.randint(0, 255, (size,), dtype=torch.uint8)}
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
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:  # a socket's path must be short
        socket = str(Path(folder) / "sidecar.sock")
        command = [
            sys.executable,
            "-m",
            "headrace.dataio.cli",
            "sidecar",
            "run",
            "--socket",
            socket,
            "--http-port",
            "off",
        ]
        process = subprocess.Popen([*command, "--cache-dir", f"{folder}/cache", "--cache-bytes", "1MiB"])
        try:
            while (found := Sidecar.find(socket)) is None:
                if process.poll() is not None:
                    raise RuntimeError("the daemon did not start")
                time.sleep(0.05)
            found.close()
            yield socket
        finally:
            process.terminate()
            process.wait(60)
