"""Checkpoints beside their peers: stall of the trainer, its slow-down, seconds until durable, bytes, seconds to restore.

Purpose: `python -m bench.checkpoint CANDIDATE DIRECTORY MIB` trains a small transformer and saves its state while it goes on
training: a first time, after one more step (all of it changed), and after a step in which nine tenths were frozen; then it
restores the last into other tensors, with the page cache as the save left it.
Invariant: every candidate saves the same bytes and counts as durable only what it has fsynced; a restored state that is not
equal to the bit, also to what it was at the moment of the save, fails the candidate.
Failure behaviour: an exception ends the process; `bench.core.measure` reports it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.checkpointing.candidates import BUILD, Built
from bench.checkpointing.training import State, Training
from bench.core import command
from bench.core.measure import Candidate, Meter, alternate
from bench.core.results import Metric, Part

_MIB = int(os.environ.get("MILLRACE_BENCH_CHECKPOINT_MIB", "256"))
METRICS = {
    "state_mib": Metric("state MiB", "MiB"),
    "first_stall_s": Metric("first: stall s", "s"),
    "first_durable_s": Metric("durable s", "s"),
    "first_mib": Metric("written MiB", "MiB"),
    "step_stall_s": Metric("after a step: stall s", "s"),
    "step_waited_s": Metric("of which later", "s"),
    "step_durable_s": Metric("durable s", "s"),
    "step_mib": Metric("written MiB", "MiB"),
    "slow_down": Metric("steps during the save, by quiet ones", ""),
    "again_durable_s": Metric("90 % frozen: durable s", "s"),
    "again_mib": Metric("written MiB", "MiB"),
    "restore_s": Metric("restore s", "s"),
    "cpu_s": Metric("CPU s", "s"),
    "peak_mib": Metric("peak MiB", "MiB"),
}


def main(argv: Sequence[str]) -> int:
    """`millrace bench checkpoint`."""
    about = "Saves and restores beside torch.save, safetensors and torch.distributed.checkpoint, in a directory."
    return command.run(argv, "checkpoint", about, fill, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=_MIB, help="state, about (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(BUILD), help="these candidates")


def fill(job: command.Job, part: Part) -> None:
    """Every candidate saves and restores the same state."""
    directory, mib = str(job.scratch / "checkpoints"), getattr(job.args, "mib", _MIB)
    names = getattr(job.args, "only", None) or list(BUILD)
    wanted = [Candidate(name, "bench.checkpoint", (name, directory, str(mib))) for name in names]
    part.title, part.settings = f"Checkpoint: about {mib} MiB of training state in a directory", {"mib": mib}
    part.metrics, part.against = METRICS, "dcp.async_save"
    alternate(wanted, job.rounds, job.tell, part.candidates)


def measure(candidate: str, directory: Path, mib: int) -> dict[str, float]:
    """Figures of one candidate in `directory`, which is emptied first."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    training = Training(mib)
    quiet = _seconds_of_a_step(training)
    meter = Meter()
    built = BUILD[candidate](directory, training)
    out = {"state_mib": sum(t.nbytes for t in training.state().values()) / 2**20}
    for name in ("first", "step", "frozen", "again"):
        if name == "frozen":  # from here on; what the save before it changed is not to count
            training.train_only(0.1)
        training.step()
        wanted, found = _save(built, training, directory)
        out |= {f"{name}_{key}": value for key, value in found.items() if f"{name}_{key}" in METRICS}
        if name == "step":
            out["slow_down"] = found["step"] / quiet
    target = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    begun = time.perf_counter()
    built.restore(target)
    out["restore_s"] = time.perf_counter() - begun
    built.close()
    if not all(torch.equal(target[name], wanted[name]) for name in wanted):
        raise AssertionError(f"{candidate} restored something else")
    return out | meter.read()


def _save(built: Built, training: Training, directory: Path) -> tuple[State, dict[str, float]]:
    """Save while training goes on; the state as it was, and the figures. A step's length is measured until durable."""
    values = training.state()
    wanted = {name: tensor.clone() for name, tensor in values.items()}
    before, begun = _bytes_under(directory), time.perf_counter()
    wait = built.save(values)
    stall = time.perf_counter() - begun
    forward = time.perf_counter()
    training.forward_backward()
    forward = time.perf_counter() - forward
    reached = time.perf_counter()
    training.optimizer.step()  # a lazy save waits here, in its hook
    took = time.perf_counter() - reached
    training.to_bf16()
    result = wait()
    durable = time.perf_counter() - begun
    waited = float(getattr(result, "waited", 0.0))
    written = (_bytes_under(directory) - before) / 2**20
    return wanted, {
        "stall_s": stall + waited,
        "waited_s": waited,
        "durable_s": durable,
        "mib": written,
        "step": forward + took - waited,
    }


def _seconds_of_a_step(training: Training) -> float:
    found = []
    for _ in range(3):
        begun = time.perf_counter()
        training.forward_backward()
        training.optimizer.step()
        found.append(time.perf_counter() - begun)
        training.to_bf16()
    return sorted(found)[1]


def _bytes_under(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
