"""Headrace: in the trainer's process, or in a sidecar that has a core of its own.

Invariant: as in `built`. Failure behaviour: as in `built`; a daemon that does not start fails the candidate.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bench.checkpointing.built import SECONDS, Built, Wait
from headrace.bench.checkpointing.training import State, Training
from headrace.checkpoint import Checkpointer

_START_SECONDS = 30.0


def headrace(where: str, training: Training, *, sidecar: str | None = None, **options: Any) -> Built:
    """Without a sidecar unless one is given."""
    checkpointer = Checkpointer(where, run="bench", sidecar=sidecar, **options)
    steps = iter(range(1, 10_000))

    def given() -> dict[str, Any]:
        # the optimizer's tensors are the state's: stored once; a lazy save learns from it what waits for its step
        more = {"optimizer": training.optimizer} if options.get("staging") == "lazy" else {}
        return {"state": training.state(), **more}

    def save(values: State) -> Wait:
        handle = checkpointer.save(next(steps), given())
        return partial(handle.result, SECONDS)

    def restore(target: State) -> None:
        checkpointer.restore({"state": target}, include="state/*")

    return Built(save, restore, checkpointer.close, warm_up=lambda: checkpointer.warm_up(given()))


def with_sidecar(where: str, training: Training, **options: Any) -> Built:
    """The trainer keeps to the first core, the daemon that saves for it to the second, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    folder = tempfile.mkdtemp(prefix="mr-")
    command = [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "sidecar",
        "run",
        "--socket",
        f"{folder}/s",
        "--http-port",
        "off",
    ]
    log = open(f"{folder}/log", "wb")  # noqa: SIM115 - the daemon's, closed with it
    daemon = subprocess.Popen([*command, "--cache-dir", f"{folder}/cache"], stdout=log, stderr=log)
    os.sched_setaffinity(daemon.pid, cores[1:] or cores)
    os.sched_setaffinity(0, cores[:1])
    until = time.monotonic() + _START_SECONDS
    while not os.path.exists(f"{folder}/s"):
        if daemon.poll() is not None or time.monotonic() > until:
            daemon.kill()
            raise RuntimeError(f"the sidecar did not start: {Path(folder, 'log').read_text()[-500:]}")
        time.sleep(0.05)
    inner = headrace(where, training, sidecar=f"{folder}/s", **options)

    def close() -> None:
        inner.close()
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(SECONDS)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)

    return Built(inner.save, inner.restore, close, warm_up=inner.warm_up)
