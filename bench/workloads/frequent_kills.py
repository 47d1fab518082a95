"""Trainers that save after every step and are killed, for `headrace bench frequent --kills` and `--node-losses`.

- `measure_kills`: a trainer is killed with SIGKILL at a random moment. Its successor restores on the same node.
- `measure_losses`: trainer and daemon of node A are killed with SIGKILL, and all files of the node are removed. A trainer
  on node B, which is A's buddy, restores. Then A starts again as an empty node, and its trainer continues.

*Steps lost* are the steps that the trainer had finished after the one that is restored.

Every element of the state is a random number of the first step, plus the number of the step. So no two chunks are equal,
no chunk is equal in two steps, and the whole state of a step is known.

Invariant: after each restore, all bytes are compared with those of the trainer at that step. Other bytes fail the
benchmark, and so does a trainer that fails. A save that fails, as on a full disk, fails the trainer.

Failure behaviour: `RuntimeError` if a trainer fails, or takes longer than `DEADLINE_SECONDS`. Its error is on standard
error.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from headrace.bench.core.nodes import Node, two_nodes
from headrace.bench.core.results import Metric
from headrace.dataio.core.errors import ConflictError
from headrace.dataio.core.limits import MIB

METRICS = {
    "kills": Metric("kills", ""),
    "steps_lost_mean": Metric("steps lost, mean", "", "lower"),
    "steps_lost_max": Metric("most", "", "lower", group="steps lost"),
    "restore_s": Metric("restore s", "s", "lower"),
}
DEADLINE_SECONDS = 120.0
_FIRST_STEPS, _MOST_STEPS = 2, 6
"""A trainer is killed after its first steps, and up to so many step times later."""


@dataclass(frozen=True)
class Job:
    """What a trainer does.

    Args:
        url: The repository.
        mib: MiB of state.
        seconds: Seconds of a step.
        sidecar: The socket of the node's daemon; None saves in the trainer's process.
        first_steps: The steps that it trains before it may be killed.
    """

    url: str
    mib: int
    seconds: float
    sidecar: str | None = None
    first_steps: int = _FIRST_STEPS


def measure_kills(
    folder: str, url: str, mib: int, seconds: float, kills: int, tiers: str, tier_bytes: int
) -> dict[str, float]:
    """Kill trainers at random moments, each the successor of the one before.

    With `tiers`, the folder of the nodes' tiers, they save through a local tier with a buddy.
    """
    url = _new_repository(url)
    with _removed(url), _nodes(folder, tiers, tier_bytes) as nodes:
        for node in nodes:
            node.start()
        job = Job(url, mib, seconds, str(nodes[0].socket) if nodes else None)
        runs = _Runs(Path(folder), job)
        for _ in range(kills):
            runs.train(job)
            runs.read(counts=True)
        runs.restore(job)  # what the last kill has lost
        return runs.figures(kills)


def measure_losses(
    folder: str, url: str, mib: int, seconds: float, losses: int, tiers: str, tier_bytes: int
) -> dict[str, float]:
    """Lose node A at random moments, and restore on node B."""
    url = _new_repository(url)
    with _removed(url), _nodes(folder, tiers, tier_bytes) as (a, b):
        b.start()
        on_a, on_b = (Job(url, mib, seconds, str(node.socket), first_steps=8) for node in (a, b))
        runs = _Runs(Path(folder), on_a)
        for _ in range(losses):
            a.start()
            runs.train(on_a, lose=a.lose)
            runs.read(counts=False)
            runs.restore(on_b)
        return runs.figures(losses)


def _new_repository(url: str) -> str:
    """The URL of a new repository below `url`."""
    return f"{url}/{secrets.token_hex(4)}"


@contextlib.contextmanager
def _removed(url: str) -> Iterator[None]:
    """Remove the repository after the block, if it is a folder. The next round needs the space."""
    try:
        yield
    finally:
        if "://" not in url:
            shutil.rmtree(url, ignore_errors=True)


@contextlib.contextmanager
def _nodes(folder: str, tiers: str, tier_bytes: int) -> Iterator[tuple[Node, ...]]:
    """The nodes, none of them started; no node without `tiers`."""
    if not tiers:
        yield ()
        return
    with two_nodes(Path(folder), Path(tiers), {}, tier_bytes=str(tier_bytes)) as nodes:
        yield nodes


_FAILED = "failed"
"""A trainer writes it to the journal when one of its saves has failed, because it may be killed before it ends."""


class _Runs:
    """The trainers, one after another, and the steps that were lost between them.

    A trainer writes to the journal: first the step that it has restored and the seconds that took, and then each step
    that it has finished.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        import torch

        import headrace.checkpoint  # the children are forks, and need not import it again

        assert headrace.checkpoint
        torch.set_num_threads(1)
        self._journal, self._random = folder / "journal", random.Random()
        self._first = [_first_values(number) for number in range(job.mib)]
        self._finished = 0
        self.lost, self.restores = list[int](), list[float]()

    def train(self, job: Job, lose: Callable[[], None] = lambda: None) -> None:
        """Run a trainer, kill it at a random moment after its first steps, and call `lose`."""
        child = self._fork(lambda: _train(job, self._first, self._journal))
        try:
            self._wait(child, job.first_steps)
            time.sleep(self._random.uniform(0, _MOST_STEPS) * job.seconds)
        finally:
            status = 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or _FAILED in self._journal.read_text():
            raise RuntimeError("a trainer failed; its error is above")
        lose()

    def restore(self, job: Job) -> None:
        """Restore in a trainer that does not train."""
        child = self._fork(lambda: _restore(job, self._first, self._journal))
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("a trainer could not restore; its error is above")
        self.read(counts=True)

    def read(self, *, counts: bool) -> None:
        """Read the journal of a trainer that has ended.

        With `counts`, it may have lost steps of the previous trainer. Without, that is an error.
        """
        restored, *finished = [line for line in self._journal.read_text().split("\n") if line.strip()]
        step, seconds = restored.split()
        if counts and self._finished:
            self.lost.append(self._finished - int(step))
            self.restores.append(float(seconds))
        elif int(step) < self._finished:
            raise AssertionError(f"step {self._finished} was restored before, and now only step {step}")
        self._finished = int(finished[-1]) if finished else int(step)

    def _wait(self, child: int, steps: int) -> None:
        """Wait until the trainer has finished `steps` steps."""
        until = time.monotonic() + DEADLINE_SECONDS
        while self._journal.read_text().count("\n") <= steps:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                raise RuntimeError("a trainer failed; its error is above")
            if time.monotonic() > until:
                raise RuntimeError(f"a trainer took longer than {DEADLINE_SECONDS:g} s for {steps} steps")
            time.sleep(0.01)

    def figures(self, kills: int) -> dict[str, float]:
        return {
            "kills": kills,
            "steps_lost_mean": mean(self.lost),
            "steps_lost_max": max(self.lost),
            "restore_s": mean(self.restores),
        }

    def _fork(self, work: Callable[[], None]) -> int:
        self._journal.write_text("")
        child = os.fork()
        if not child:
            status = 1
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return child


def _first_values(number: int) -> Any:
    """One MiB of random whole numbers. Adding the number of a step to them is exact in fp32."""
    import torch

    return torch.randint(0, 1 << 20, (MIB // 4,), generator=torch.Generator().manual_seed(number)).float()


class _State:
    """The trainer's state. A step of the optimizer adds one to every element."""

    def __init__(self, first: list[Any]) -> None:
        import torch

        self._first = first
        self.tensors = {f"layer_{number}": tensor.clone() for number, tensor in enumerate(first)}
        self.optimizer = torch.optim.SGD(list(self.tensors.values()), lr=1.0, foreach=True)
        self.state = {"model": self.tensors, "optimizer": self.optimizer}

    def restore(self, checkpointer: Any, journal: Path) -> int:
        """Restore, check all bytes, and write the restored step. Returns it."""
        import torch

        began = time.perf_counter()
        step = checkpointer.restore(self.state) or 0
        seconds = time.perf_counter() - began
        for tensor, first in zip(self.tensors.values(), self._first, strict=True):
            if not torch.equal(tensor, first + step):
                raise AssertionError(f"step {step} was restored with other values")
        _append(journal, f"{step} {seconds:.4f}")
        return int(step)


def _restore(job: Job, first: list[Any], journal: Path) -> None:
    with _checkpointer(job) as checkpointer:
        _State(first).restore(checkpointer, journal)


def _train(job: Job, first: list[Any], journal: Path) -> None:
    """Restore, and save after every step until this process is killed.

    With a daemon, two errors are not failures: only the tier has the step, or the daemon has committed it for the
    previous trainer.
    """
    import torch

    from headrace.checkpoint.tier.saving import LocalOnlyError

    with _checkpointer(job) as checkpointer:
        training = _State(first)
        step = training.restore(checkpointer, journal)
        gradient = torch.full((MIB // 4,), -1.0)
        for tensor in training.tensors.values():
            tensor.grad = gradient
        expected = (ConflictError, LocalOnlyError) if job.sidecar else ()
        due, handles = time.perf_counter(), deque[Any]()
        while True:
            due = max(due + job.seconds, time.perf_counter())
            time.sleep(max(due - time.perf_counter(), 0.0))
            training.optimizer.step()
            step += 1
            _append(journal, str(step))
            handles.append(checkpointer.save(step, training.state))
            while handles and handles[0].done:
                error = handles.popleft().error
                if error is not None and not isinstance(error, expected):
                    _append(journal, _FAILED)
                    raise error


def _checkpointer(job: Job) -> Any:
    from headrace.checkpoint import Checkpointer, Keep

    uploads = "newest" if job.sidecar else "all"
    return Checkpointer(
        job.url, run="r", sidecar=job.sidecar, staging="lazy", uploads=uploads, keep=Keep(last=2), record=False
    )


def _append(journal: Path, line: str) -> None:
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)
