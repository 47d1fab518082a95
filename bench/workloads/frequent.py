"""`headrace bench frequent`: a save after every step of a training loop.

A step trains a real transformer on the CPU, and then sleeps until `--step` seconds are over, as a trainer waits for its
GPU. The loop runs once without saves. Then it saves after every step:

- *Time lost* is the additional time of the loop, as a share of the loop without saves.
- *Steps behind* is the number of finished steps that are not yet durable, at the end of each step. A step is durable when
  it is committed, or in the local tier.
- *Steps uploaded* are those of the loop that are committed in the store, as a share. With a local tier, the others stay
  on the node. *Store behind* and *buddy behind* are the finished steps after the newest one that the store or the buddy
  has.

With `--s3`, the store is a server on this machine with `--delay` and `--rate`. With `--local-tier`, there are two nodes
with a daemon each, and the second is the buddy of the first.

`--kills` and `--node-losses` kill trainers or lose nodes instead, and count the steps that are lost (`frequent_kills`).
Each round has this number of kills or losses, and its own repository.

Failure behaviour: a candidate that fails is named, and the others continue.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, alternate, cpu_seconds
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB

if TYPE_CHECKING:
    from headrace.bench.core.nodes import Node

LAZY, EAGER, DCP = "headrace, lazy", "headrace", "dcp.async_save, stager"
TIER = "headrace, lazy, local tier and buddy"
METRICS = {
    "lost_share": Metric("time lost, share", "", "lower"),
    "behind_mean": Metric("steps behind, mean", "", "lower"),
    "behind_max": Metric("most", "", "lower", group="steps behind"),
    "durable": Metric("steps durable, share", "", "higher"),
    "stall_s": Metric("stall s", "s", "lower"),
    "cpu_s": Metric("CPU s a step", "s", "lower"),
}
STORE_METRICS = {
    "uploaded": Metric("steps uploaded, share", ""),
    "store_mb_s": Metric("MB/s to the store", "MB/s"),
    "store_behind_mean": Metric("store behind, steps, mean", "", "lower"),
    "store_behind_max": Metric("most", "", "lower", group="store behind"),
}
BUDDY_METRICS = {
    "buddy_behind_mean": Metric("buddy behind, steps, mean", "", "lower"),
    "buddy_behind_max": Metric("most", "", "lower", group="buddy behind"),
    "daemons_cpu_s": Metric("CPU s of the daemons a step", "s", "lower"),
}
KILLED, LOST = "headrace, lazy, killed", "headrace, lazy, node lost"
_DEADLINE_SECONDS = 120.0
_WARM_UP = 4
"""Steps before the measured ones. The first saves allocate memory."""
_TIER_STEPS = 12
"""The space of a tier, in steps."""
_BUCKET = "bench"


@benchmark(
    "frequent",
    "A save after every step: the time it costs, and the steps that a kill or the loss of a node loses.",
    argument("--mib", type=positive_int, default=256, help="MiB of state (default: %(default)s)"),
    argument("--step", type=float, default=0.25, help="seconds of a step (default: %(default)s)"),
    argument("--steps", type=positive_int, default=40, help="measured steps of a loop (default: %(default)s)"),
    argument("--s3", action="store_true", help="save to an S3 server on this machine, not to a directory"),
    argument("--delay", type=float, default=0, metavar="MS", help="milliseconds by which the server answers late"),
    argument("--rate", type=float, default=0, metavar="MB", help="the most MB a second to and from the server"),
    argument("--local-tier", action="store_true", help="save through a local tier, with a buddy on a second node"),
    argument("--tier-directory", type=Path, metavar="PATH", help="where the tiers are (default: --directory)"),
    argument(
        "--kills", type=int, default=0, help="kill a trainer this often in each round, instead (default: %(default)s)"
    ),
    argument(
        "--node-losses", type=int, default=0, help="lose a node this often in each round, instead; needs --local-tier"
    ),
)
def frequent(job: Job, part: Part) -> None:
    """Measure all candidates in turn, or kill trainers, or lose nodes."""
    args = job.args
    if args.node_losses and not args.local_tier:
        raise UsageError("--node-losses needs --local-tier", hint="without a buddy, the node's steps are lost with it")
    if (args.delay or args.rate) and not args.s3:
        raise UsageError("--delay and --rate are those of the S3 server", hint="give --s3, too")
    names = ("mib", "step", "steps", "kills", "node_losses", "s3", "local_tier")
    part.settings = {name: getattr(args, name) for name in names} | {"delay_ms": args.delay, "rate_mb": args.rate}
    part.notes += _notes(job)
    with _store(job) as url, _tiers(job) as tiers:
        if args.kills or args.node_losses:
            _kill(job, part, url, tiers)
        else:
            _measure_all(job, part, url, tiers)


def _measure_all(job: Job, part: Part, url: str, tiers: str) -> None:
    args = job.args
    part.title = f"A save of {args.mib} MiB after every step of {args.step:g} s"
    names = (LAZY, TIER) if args.local_tier else (LAZY, EAGER) if args.s3 else (LAZY, EAGER, DCP)
    part.metrics, part.against = dict(METRICS), names[-1]
    part.metrics |= (STORE_METRICS if args.s3 else {}) | (BUDDY_METRICS if args.local_tier else {})
    shared = str(job.scratch), args.mib, args.step, args.steps
    candidates = [
        Candidate(
            name, "headrace.bench.workloads.frequent:measure", (name, *shared, url, tiers if name == TIER else "")
        )
        for name in names
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)


def _kill(job: Job, part: Part, url: str, tiers: str) -> None:
    from headrace.bench.workloads import frequent_kills

    args, what = job.args, f"of a trainer that saves {job.args.mib} MiB after every step of {job.args.step:g} s"
    name, times, title = KILLED, args.kills, f"{args.kills} kills {what}"
    if args.node_losses:
        name, times, title = LOST, args.node_losses, f"{args.node_losses} losses of the node {what}"
    part.title, part.metrics = title, frequent_kills.METRICS
    function = "measure_losses" if args.node_losses else "measure_kills"
    arguments = (str(job.scratch), url, args.mib, args.step, times, tiers, _TIER_STEPS * args.mib * MIB)
    candidate = Candidate(name, f"headrace.bench.workloads.frequent_kills:{function}", arguments)
    alternate([candidate], job.rounds, job.progress, part.candidates, seconds=times * _DEADLINE_SECONDS)


def _notes(job: Job) -> list[str]:
    args = job.args
    if not args.rate:
        return []
    share = args.rate * 1e6 * args.step / (args.mib * MIB)
    return [f"At {args.rate:g} MB/s, the store can take {min(share, 1):.0%} of the steps at most."]


@contextlib.contextmanager
def _store(job: Job) -> Iterator[str]:
    """The URL of the repository. Processes find the server of `--s3` through the environment."""
    if not job.args.s3:
        yield str(job.scratch / "checkpoints")
        return
    from headrace.bench.core.processes import environment_variables, server

    root = job.scratch / "server"
    (root / _BUCKET).mkdir(parents=True)
    with (
        server(root, job.args.rate * 1e6, job.args.delay / 1e3, writable=True) as running,
        environment_variables(running.environ),
    ):
        yield f"s3://{_BUCKET}/checkpoints"


@contextlib.contextmanager
def _tiers(job: Job) -> Iterator[str]:
    """The folder of the tiers; "" without `--local-tier`."""
    if not job.args.local_tier:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="mrb-", dir=job.args.tier_directory or job.scratch) as folder:
        yield folder


def measure(
    name: str, folder: str, mib: int, seconds: float, steps: int, url: str = "", tiers: str = ""
) -> dict[str, float]:
    """Measure the loop without saves, and then with a save after every step. Each call saves to its own repository."""
    from headrace.bench.core.nodes import two_nodes
    from headrace.bench.workloads.training import Training

    where = Path(folder) / "checkpoints"
    url = f"{url or where}/{secrets.token_hex(4)}" if name != DCP else str(where)
    training = Training(mib)
    quiet = _loop(training, seconds, steps, lambda: None)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, where, ignore_errors=True)
        node: Node | None = None
        if tiers:
            node, buddy = stack.enter_context(
                two_nodes(Path(folder), Path(tiers), {}, tier_bytes=str(_TIER_STEPS * mib * MIB))
            )
            buddy.start()
            node.start()
        saving = _saving(name, url, training, node)
        stack.callback(saving.close)
        _loop(training, seconds, _WARM_UP, saving.save)
        saving.reset()
        cpu = cpu_seconds(), _daemons_cpu(node, buddy) if tiers else 0.0
        busy = _loop(training, seconds, steps, saving.save)
        figures = {"lost_share": busy / quiet - 1, "cpu_s": (cpu_seconds() - cpu[0]) / steps}
        if tiers:
            figures["daemons_cpu_s"] = (_daemons_cpu(node, buddy) - cpu[1]) / steps
        figures.update(saving.figures(steps, busy))
        return figures


def _saving(name: str, url: str, training: Any, node: Node | None) -> Any:
    if name == DCP:
        return _Dcp(Path(url), training)
    return _Headrace(url, training, lazy=name != EAGER, node=node)


def _daemons_cpu(*nodes: Node | None) -> float:
    return sum(node.daemon.cpu_seconds() for node in nodes if node is not None and node.daemon is not None)


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

    def durable(self) -> int:
        """Wait for the last save, and return the number of steps that became durable."""
        raise NotImplementedError

    def figures(self, steps: int, seconds: float) -> dict[str, float]:
        """The figures of the loop, which took so many seconds."""
        return {
            "behind_mean": mean(self.behind),
            "behind_max": max(self.behind),
            "durable": self.durable() / steps,
            "stall_s": mean(self.stalls),
        }

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
    """Saves with Headrace: with `node` through its local tier, else in this process."""

    def __init__(self, url: str, training: Any, *, lazy: bool, node: Node | None) -> None:
        from headrace.checkpoint import Checkpointer, Keep

        super().__init__()
        self._training, self._is_remote = training, url.startswith("s3:")
        sidecar = None if node is None else str(node.socket)
        uploads, staging = "all" if node is None else "newest", "lazy" if lazy else "eager"
        self._checkpointer = Checkpointer(
            url, run="r", sidecar=sidecar, staging=staging, uploads=uploads, keep=Keep(last=2)
        )
        self._step, self._handles = 0, list[Any]()
        self._buddy = None if node is None else _BuddyWatch(node)
        self._store_behind, self._buddy_behind = list[int](), list[int]()

    def reset(self) -> None:
        super().reset()
        self._first, self._store_behind, self._buddy_behind = self._step + 1, [], []

    def save(self) -> None:
        self._step += 1
        began = time.perf_counter()
        state = {"model": self._training.model, "optimizer": self._training.optimizer}
        handle = self._checkpointer.save(self._step, state)
        self._handles.append(handle)
        self.add(began, lambda: handle.kept)
        self._store_behind.append(self._step - max((h.step for h in self._handles if _is_committed(h)), default=0))
        if self._buddy is not None:
            self._buddy_behind.append(self._step - self._buddy.step)

    def durable(self) -> int:
        for handle in self._handles:
            handle.wait(_DEADLINE_SECONDS)
        return sum(handle.kept for handle in self._handles if handle.step >= self._first)

    def figures(self, steps: int, seconds: float) -> dict[str, float]:
        figures = super().figures(steps, seconds)
        committed = [
            handle.result() for handle in self._handles if handle.step >= self._first and _is_committed(handle)
        ]
        if self._is_remote:
            figures |= {
                "uploaded": len(committed) / steps,
                "store_mb_s": sum(result.bytes_written for result in committed) / seconds / 1e6,
                "store_behind_mean": mean(self._store_behind),
                "store_behind_max": max(self._store_behind),
            }
        if self._buddy is not None:
            figures["buddy_behind_mean"] = mean(self._buddy_behind)
            figures["buddy_behind_max"] = max(self._buddy_behind)
        return figures

    def close(self) -> None:
        if self._buddy is not None:
            self._buddy.stop()
        self._checkpointer.close()


def _is_committed(handle: Any) -> bool:
    return bool(handle.done and handle.error is None)


class _BuddyWatch:
    """Asks the daemon 20 times a second which step the buddy has."""

    def __init__(self, node: Node) -> None:
        self.step, self._stopped = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(node,))
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self, node: Node) -> None:
        assert node.daemon is not None
        with node.daemon.connect() as connection:
            while not self._stopped.wait(0.05):
                tier: Any = connection.status()["tier"]
                self.step = max((copy["step"] for copy in tier["buddy"]["copies"]), default=0)


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
