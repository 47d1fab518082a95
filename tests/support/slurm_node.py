"""A folder that stands for a node of a Slurm cluster, with stand-ins for `srun` and `scontrol`.

`srun` runs one task, and exits with its code. `scontrol` writes its arguments to `scontrol.log`. Slurm itself is not here.
"""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SLURM = Path(__file__).parents[2] / "deploy" / "slurm"


@dataclass
class Node:
    """A folder that stands for a node, and its scripts' environment."""

    folder: Path
    environment: dict[str, str]

    @property
    def run(self) -> Path:
        return self.folder / f"headrace-{getpass.getuser()}"

    @property
    def socket(self) -> Path:
        return self.run / "sidecar.sock"

    def script(self, name: str, job: int) -> None:
        environment = {**self.environment, "SLURM_JOB_ID": str(job)}
        done = subprocess.run([SLURM / name], env=environment, timeout=150, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @property
    def daemon(self) -> int | None:
        """The daemon's process, None once it has ended."""
        try:
            pid = int((self.run / "sidecar.sock.lock").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if b"sidecar" in command else None


@contextmanager
def slurm_node() -> Iterator[Node]:
    """A node with the environment of the scripts of deploy/slurm."""
    with tempfile.TemporaryDirectory(prefix="mr-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        headrace = folder / "bin" / "headrace"
        headrace.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace.dataio.cli "$@"\n')
        requeue = folder / "bin" / "scontrol"
        requeue.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.log\n')
        srun = folder / "bin" / "srun"  # one task, and its exit code; a signal of Slurm's goes to the task alone
        srun.write_text(f'#!/bin/bash\nshift\n"$@" & echo $! > {folder}/task; wait $!; exit $?\n')
        for script in (headrace, requeue, srun):
            script.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.fspath(SLURM.parents[1]),
            "HEADRACE_BIN": os.fspath(headrace),
            "HEADRACE_RUN_DIR": name,
            "HEADRACE_CACHE_DIR": os.fspath(folder / "cache"),
            "HEADRACE_SLURM_OPTIONS": "--cache-bytes 64MiB",
            "SLURM_JOB_USER": getpass.getuser(),
            "SLURM_JOB_NAME": "train",
            "PYTHON": sys.executable,
            "TRAIN": os.fspath(SLURM / "train.py"),
            "CHECKPOINTS": os.fspath(folder / "ck"),
        }
        for unwanted in ("HEADRACE_SIDECAR", "NOTIFY_SOCKET"):
            environment.pop(unwanted, None)
        made = Node(folder, environment)
        try:
            yield made
        finally:
            if made.daemon is not None:
                os.kill(made.daemon, signal.SIGKILL)
