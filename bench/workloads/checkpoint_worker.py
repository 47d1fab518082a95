"""Measure one candidate: `python -m headrace.bench.workloads.checkpoint_worker NAME WHERE MIB RANKS STEPS LORA`.

It prints one JSON object.

Invariant: with several ranks this process starts a process for each rank and prints the figures of rank 0. The ranks
rendezvous by a file, not by a port: another process may take a free port while the ranks import torch.
Failure behaviour: the first rank that fails ends the others, and this process reports the end of its error. No rank
outlives this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bench.workloads.checkpoint import ENTRIES
from headrace.bench.workloads.checkpoint_run import Job, measure

_MEETING = "HEADRACE_BENCH_MEETING"
"""The environment variable with the rendezvous file of the ranks and the id of the process that started them."""
_PR_SET_PDEATHSIG = 1


def run(arguments: list[str]) -> dict[str, float]:
    """Measure in this process."""
    name, where, mib, ranks, steps, lora = arguments
    entry = ENTRIES[name]
    checkpointers: Any = importlib.import_module("headrace.bench.peers.checkpointers")  # needs torch
    build = partial(getattr(checkpointers, entry.build), **entry.options)
    return measure(Job(build, where, int(mib), int(ranks), int(steps), lora == "1"))


def _rank(arguments: list[str]) -> None:
    import torch.distributed as dist

    file, _, parent = os.environ[_MEETING].rpartition(" ")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank has ended")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
    found = run(arguments)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _start(arguments: list[str], ranks: int) -> str:
    """Run all ranks and return the last line that rank 0 printed."""
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common = os.environ | sizes | {"MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "headrace.bench.workloads.checkpoint_worker", *arguments]
    with tempfile.TemporaryDirectory(prefix="mrb-") as name, contextlib.ExitStack() as stack:
        folder, processes = Path(name), []
        for rank in range(ranks):
            out, err = (stack.enter_context((folder / f"{rank}.{kind}").open("wb")) for kind in ("out", "err"))
            meeting = f"{folder / 'meeting'} {os.getpid()}"
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), _MEETING: meeting}
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=environment))
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
            ended = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, failed in enumerate(ended):
            if failed:
                sys.exit(f"rank {rank}: {(folder / f'{rank}.err').read_text()[-2000:]}")
        return (folder / "0.out").read_text().strip().splitlines()[-1]


if __name__ == "__main__":
    given, count = sys.argv[1:], int(sys.argv[4])
    if count > 1 and _MEETING not in os.environ:
        print(_start(given, count))
    elif count > 1:
        _rank(given)
    else:
        print(json.dumps(run(given)))
