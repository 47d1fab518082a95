"""`headrace bench frequent`: a save after every step of a training loop.

A step trains a real transformer on the CPU, and then sleeps until `--step` seconds are over, as a trainer waits for its
GPU. The loop runs once without saves. Then it saves after every step:

- *Time lost* is the additional time of the loop, as a share of the loop without saves.
- *Steps behind* is the number of finished steps that are not yet durable, at the end of each step.

With `--kills`, a trainer is killed with SIGKILL at random moments and started again. *Steps lost* are the steps that it
had finished after the last one that its successor restored.

Invariant: after each kill, every element of the restored state has the value of its step. A trainer that loses more
than it may, or restores something else, fails the benchmark.

Failure behaviour: a candidate that fails is named, and the others continue.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, alternate, cpu_seconds
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.limits import MIB

LAZY, EAGER, DCP = "headrace, lazy", "headrace", "dcp.async_save, stager"
METRICS = {
    "lost_share": Metric("time lost, share", "", "lower"),
    "behind_mean": Metric("steps behind, mean", "", "lower"),
    "behind_max": Metric("most", "", "lower", group="steps behind"),
    "durable": Metric("steps durable, share", "", "higher"),
    "stall_s": Metric("stall s", "s", "lower"),
    "cpu_s": Metric("CPU s a step", "s", "lower"),
}
KILL_METRICS = {
    "kills": Metric("kills", ""),
    "steps_lost_mean": Metric("steps lost, mean", "", "lower"),
    "steps_lost_max": Metric("most", "", "lower", group="steps lost"),
}
KILLED = "headrace, lazy, killed"
_DEADLINE_SECONDS = 120.0
_WARM_UP = 4
"""Steps before the measured ones. The first saves allocate memory."""


@benchmark(
    "frequent",
    "A save after every step: the time it costs, and the steps that a kill loses.",
    argument("--mib", type=positive_int, default=256, help="MiB of state (default: %(default)s)"),
    argument("--step", type=float, default=0.25, help="seconds of a step (default: %(default)s)"),
    argument("--steps", type=positive_int, default=40, help="measured steps of a loop (default: %(default)s)"),
    argument("--kills", type=int, default=0, help="kill a trainer this often, instead (default: %(default)s)"),
)
def frequent(job: Job, part: Part) -> None:
    """Measure all candidates in turn, or kill a trainer."""
    args = job.args
    part.settings = {"mib": args.mib, "step": args.step, "steps": args.steps, "kills": args.kills}
    if args.kills:
        part.title = f"{args.kills} kills of a trainer that saves {args.mib} MiB after every step of {args.step:g} s"
        part.metrics = KILL_METRICS
        arguments: tuple[Any, ...] = (str(job.scratch), args.mib, args.step, args.kills)
        candidate = Candidate(KILLED, "headrace.bench.workloads.frequent:measure_kills", arguments)
        alternate([candidate], 1, job.progress, part.candidates, seconds=args.kills * _DEADLINE_SECONDS)
        return
    part.title = f"A save of {args.mib} MiB after every step of {args.step:g} s"
    part.metrics, part.against = METRICS, DCP
    candidates = [
        Candidate(
            name, "headrace.bench.workloads.frequent:measure", (name, str(job.scratch), args.mib, args.step, args.steps)
        )
        for name in (LAZY, EAGER, DCP)
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)


def measure(name: str, folder: str, mib: int, seconds: float, steps: int) -> dict[str, float]:
    """Measure the loop without saves, and then with a save after every step."""
    from headrace.bench.workloads.training import Training

    where = Path(folder) / "checkpoints"
    training = Training(mib)
    quiet = _loop(training, seconds, steps, lambda: None)
    saving: Any = _Dcp(where, training) if name == DCP else _Headrace(where, training, name == LAZY)
    try:
        _loop(training, seconds, _WARM_UP, saving.save)
        saving.reset()
        cpu = cpu_seconds()
        busy = _loop(training, seconds, steps, saving.save)
        cpu = cpu_seconds() - cpu
        durable = saving.durable() / steps
    finally:
        saving.close()
        shutil.rmtree(where, ignore_errors=True)
    return {
        "lost_share": busy / quiet - 1,
        "behind_mean": mean(saving.behind),
        "behind_max": max(saving.behind),
        "durable": durable,
        "stall_s": mean(saving.stalls),
        "cpu_s": cpu / steps,
    }


def _loop(training: Any, seconds: float, steps: int, save: Callable[[], None]) -> float:
    """Run the steps, and return the seconds they took."""
    began = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        training.step()
        time.sleep(max(start + seconds - time.perf_counter(), 0.0))
        save()
    return time.perf_counter() - began


class _Saving:
    """Counts the stalls, and the steps that are not durable when the next one is saved."""

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self.behind: list[int] = []
        self._waiting: list[Callable[[], bool]] = []

    def reset(self) -> None:
        """Forget the steps so far."""
        self.stalls, self.behind = [], []

    def add(self, began: float, is_done: Callable[[], bool]) -> None:
        """Count a save that has returned."""
        self.stalls.append(time.perf_counter() - began)
        self._waiting = [waiting for waiting in self._waiting if not waiting()]
        self.behind.append(len(self._waiting))
        self._waiting.append(is_done)


class _Headrace(_Saving):
    def __init__(self, where: Path, training: Any, lazy: bool) -> None:
        from headrace.checkpoint import Checkpointer, Keep

        super().__init__()
        self._training = training
        staging = "lazy" if lazy else "eager"
        self._checkpointer = Checkpointer(where, run="r", sidecar=None, staging=staging, keep=Keep(last=2))
        self._step, self._handles = 0, list[Any]()

    def reset(self) -> None:
        super().reset()
        self._handles = []

    def save(self) -> None:
        self._step += 1
        began = time.perf_counter()
        state = {"model": self._training.model, "optimizer": self._training.optimizer}
        handle = self._checkpointer.save(self._step, state)
        self._handles.append(handle)
        self.add(began, lambda: handle.done)

    def durable(self) -> int:
        """Wait for the last save, and return the number of steps that became durable."""
        for handle in self._handles:
            handle.wait(_DEADLINE_SECONDS)
        return sum(handle.done and handle.error is None for handle in self._handles)

    def close(self) -> None:
        self._checkpointer.close()


class _Dcp(_Saving):
    """Waits for the save before, as DCP's documentation does. Keeps two steps."""

    def __init__(self, where: Path, training: Any) -> None:
        from headrace.bench.peers import checkpointers

        super().__init__()
        where.mkdir()
        self._training, self._where, self._step = training, where, 0
        self._built = checkpointers.dcp(str(where), training, kind="stager")
        self._last: Any = None
        self._ended_saves = 0

    def reset(self) -> None:
        super().reset()
        self._last.join()
        self._ended_saves = 0

    def save(self) -> None:
        self._step += 1
        began = time.perf_counter()
        if self._last is not None:
            self._last.join()
        shutil.rmtree(self._where / str(self._step - 2), ignore_errors=True)
        wait = self._built.save(self._training.state())

        def ended() -> None:
            wait()
            self._ended_saves += 1

        self._last = thread = threading.Thread(target=ended)
        thread.start()
        self.add(began, lambda: not thread.is_alive())

    def durable(self) -> int:
        self._last.join(_DEADLINE_SECONDS)
        return self._ended_saves

    def close(self) -> None:
        if self._last is not None:
            self._last.join(_DEADLINE_SECONDS)
        self._built.close()


def measure_kills(folder: str, mib: int, seconds: float, kills: int) -> dict[str, float]:
    """Kill trainers at random moments, each the successor of the one before."""
    import headrace.checkpoint  # the children are forks, and need not import it again

    assert headrace.checkpoint
    where, journal = Path(folder) / "checkpoints", Path(folder) / "journal"
    lost, rng, previous = list[int](), random.Random(0), 0
    for number in range(kills):
        journal.write_text("")
        child = os.fork()
        if not child:
            _run_child(where, journal, mib, seconds)
        _wait_for_steps(child, journal, 2)
        time.sleep(rng.uniform(0, 6 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        restored, *finished = [int(line) for line in journal.read_text().split("\n") if line.strip()]
        if number:
            lost.append(previous - restored)
        previous = finished[-1]
    return {"kills": kills, "steps_lost_mean": mean(lost), "steps_lost_max": max(lost)}


def _wait_for_steps(child: int, journal: Path, steps: int) -> None:
    until = time.monotonic() + _DEADLINE_SECONDS
    while journal.read_text().count("\n") <= steps:
        if os.waitpid(child, os.WNOHANG)[0]:
            raise RuntimeError("a trainer failed; its error is above")
        if time.monotonic() > until:
            raise RuntimeError(
                f"a trainer took longer than {_DEADLINE_SECONDS:g} s to restore and to train {steps} steps"
            )
        time.sleep(0.01)


def _run_child(where: Path, journal: Path, mib: int, seconds: float) -> None:
    try:
        _train(where, journal, mib, seconds)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _train(where: Path, journal: Path, mib: int, seconds: float) -> None:
    """Restore, write the restored step, and save after every step until this process is killed."""
    import torch

    from headrace.checkpoint import Checkpointer, Keep

    torch.set_num_threads(1)
    tensors = {f"layer_{number}": torch.zeros(MIB // 4) for number in range(mib)}
    optimizer = torch.optim.SGD(list(tensors.values()), lr=1.0, foreach=True)
    state = {"model": tensors, "optimizer": optimizer}
    checkpointer = Checkpointer(where, run="r", sidecar=None, staging="lazy", keep=Keep(last=2))
    step = checkpointer.restore(state) or 0
    if not all(bool((tensor == step).all()) for tensor in tensors.values()):
        raise AssertionError(f"step {step} was restored with other values")
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND)
    os.write(fd, f"{step}\n".encode())
    gradient = torch.full((MIB // 4,), -1.0)
    for tensor in tensors.values():
        tensor.grad = gradient  # each step adds one
    while True:
        time.sleep(seconds)
        optimizer.step()
        step += 1
        os.write(fd, f"{step}\n".encode())
        checkpointer.save(step, state)
