"""Random histories of a repository: real trainers, daemons, buddies, readers and collectors, disturbed at random, then judged.

    python -m tests.histories.history --minutes 10 [--seed N] [--s3]

Purpose: one seed draws rounds. In each, processes work at the same time. Some of them are killed (SIGKILL, at random moments
or named points), held (SIGSTOP), or lose their daemon or their whole node, and the store's answers are disturbed. When all are
quiet again, the driver reads everything and `tests.histories.oracle` judges it.
Invariant: the driver knows only the journal and what readers see. A process that never ends is a failure, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import check, collect, tag_records
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server, start_seaweedfs
from tests.dataio.sidecar.tier.conftest import make_certificates
from tests.histories import worker
from tests.histories.oracle import Found, Journal, Seen, judge, read_journal
from tests.histories.worker import Task
from tests.support.checkpoint_states import load
from tests.support.nursery import Child
from tests.support.tier_nodes import Node, free_port, tls_files

HANG_SECONDS = 90.0
ROUNDS = 12
"""Of one repository; a later history begins with an empty one."""
POINTS = sorted(name for name in declared() if name.startswith(("ckpt.", "gc.", "store.")))
FAULTS = [
    *(Fault.REFUSE, Fault.SLOW_DOWN, Fault.LOSE_ANSWER, Fault.RESET_BODY, Fault.CUT_BODY, Fault.ERROR_IN_200),
    *(Fault.LATE, Fault.TWICE, Fault.APPLIED_409, Fault.APPLIED_412),
]


class Violation(AssertionError):
    """What the oracle found, with the seed that draws the same history again."""


@dataclass
class Running:
    """A process of this round. `held`: it is stopped until this moment."""

    task: Task
    child: Child
    held: float = 0.0


@dataclass
class History:
    """One repository, from the first step to the last round."""

    url: str
    folder: Path
    seed: int
    nodes: list[Node] = field(default_factory=list)
    proxy: FaultProxy | None = None
    environment: dict[str, str] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._draw = random.Random(self.seed)
        self._path = str(self.folder / "journal")
        self._journal = Journal(self._path)
        self._runs = ["main"]
        self._names = 0

    def round(self) -> None:
        """Some processes, some disturbances; then quiet, and judgement."""
        if self.proxy is not None:
            self._disturb_store(self.proxy)
        running = [Running(task, worker.start(task, self.environment)) for task in self._tasks()]
        try:
            self._disturb(running)
            if self.proxy is not None:
                self.proxy.forget()
            for each in running:
                self._wait_for_end(each)
        finally:
            for each in running:
                each.child.kill()
                with contextlib.suppress(ValueError):  # its pipes are closed already
                    each.child.communicate()
        self._settle()
        self.judge()
        self.count["rounds"] += 1

    def judge(self) -> None:
        lines = read_journal(self._path)
        broken = [line for line in lines if line["event"] == "broken"]
        wrong = [str(line) for line in broken] or judge(lines, self._look())
        if wrong:
            raise Violation(f"seed {self.seed}, {self.url}:\n" + "\n".join(wrong))

    # what a round does

    def _tasks(self) -> list[Task]:
        draw = self._draw
        tasks = [self._trainer(draw.choice(self._runs))]
        if draw.random() < 0.15:
            tasks.append(self._trainer(tasks[0].run))  # a second one that believes the run to be its own
        if draw.random() < 0.1 and self.count["rounds"]:
            self._runs.append(f"fork{len(self._runs)}")
            tasks.append(self._trainer(self._runs[-1], start=None, base=draw.choice(self._runs[:-1])))
        for kind, share in (("reader", 0.5), ("collector", 0.35), ("tagger", 0.25)):
            if draw.random() < share:
                tasks.append(self._task(kind, draw.choice(self._runs)))
        return tasks

    def _task(self, kind: str, run: str, **more: object) -> Task:
        self._names += 1
        draw = self._draw
        keep = draw.choice([0, 0, 2, 3]) if kind == "collector" and run != "main" else 0
        crash = draw.choice(POINTS) if kind in ("trainer", "collector") and draw.random() < 0.25 else ""
        name = f"tag{draw.randrange(3)}" if kind == "tagger" else f"{kind}{self._names}"
        about = {"keep": keep, "crash": crash, "nth": draw.choice([1, 1, 2, 3]), "mark": str(self.folder / "marks")}
        return Task(kind, name, self.url, self._path, run, seed=draw.getrandbits(60), **{**about, **more})  # type: ignore[arg-type]

    def _trainer(self, run: str, **more: object) -> Task:
        draw = self._draw
        node = draw.choice(self.nodes) if self.nodes and draw.random() < 0.8 else None
        about: dict[str, object] = {
            "node": str(node.folder) if node else "",
            "socket": node.socket if node else "",
            "compression": draw.choice(["none", "zstd", "auto", "delta"]),
            "lazy": draw.random() < 0.2,
            "overlap": draw.random() < 0.3,
            "steps": draw.choice([1, 2, 3, 5]),
            "pause": draw.choice([0.0, 0.0, 0.1, 0.3]),
            "keep": draw.choice([0, 2, 3]) if run != "main" else 0,
        }
        if run == "main" and draw.random() < 0.15 and (steps := self._steps(run)):
            about["start"] = draw.choice(steps)  # an explicit return to an older step
        return self._task("trainer", run, **about | more)

    def _steps(self, run: str) -> list[int]:
        with open_store(self.url) as store:
            return [found.step for found in repository.visible(store, run)] if repository.read_repo(store) else []

    def _disturb_store(self, proxy: FaultProxy) -> None:
        faults = self._draw.choices(FAULTS, k=self._draw.choice([0, 2, 4, 8]))
        if self._draw.random() < 0.5:
            faults.append(Fault.FLIP_BIT)  # one a round: what is damaged twice in a row is taken for damage
        for fault in faults:
            writes = fault in (Fault.LATE, Fault.TWICE, Fault.APPLIED_409, Fault.APPLIED_412)
            method = "PUT" if writes else self._draw.choice(["", "GET", "PUT"])
            path = self._draw.choice(["", "/packs/", "/runs/", "/leases/", "fate", "COMMIT"])
            proxy.inject(fault, times=1, method=method, path=path, seconds=self._draw.choice([0.1, 1.0, 5.0]))

    def _disturb(self, running: list[Running]) -> None:
        """While they work: kill, hold, or take away a daemon or a node."""
        draw, until = self._draw, time.monotonic() + self._draw.uniform(0.05, 1.5)
        kinds = ["nothing", "kill", "kill", "hold"] + (["daemon", "daemon", "node"] if self.nodes else [])
        what = draw.choice(kinds)
        time.sleep(max(until - time.monotonic(), 0.0))
        victim = draw.choice(running)
        if what == "kill":
            victim.child.kill()
        elif what == "hold" and victim.child.poll() is None:
            victim.child.send_signal(signal.SIGSTOP)
            victim.held = time.monotonic() + draw.choice([0.2, 1.0, worker.LEASE_SECONDS + 1.5])
        elif what == "daemon":
            draw.choice(self.nodes).processes[0].send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))
        elif what == "node":
            self._lose(draw.choice(self.nodes), running)
        self.count[f"disturbance: {what}"] += 1

    def _lose(self, node: Node, running: list[Running]) -> None:
        """The machine and everything on it."""
        node.kill()
        for each in running:
            if each.task.node == str(node.folder):
                each.child.kill()
        self._journal.say("node lost", node=str(node.folder))
        for path in node.folder.iterdir():
            if path.name != "log":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    # quiet

    def _wait_for_end(self, each: Running) -> None:
        if each.held:
            time.sleep(max(each.held - time.monotonic(), 0.0))
            with contextlib.suppress(ProcessLookupError):
                each.child.send_signal(signal.SIGCONT)
        try:
            each.child.communicate(HANG_SECONDS)
        except Exception as error:
            raise Violation(f"seed {self.seed}: {each.task} did not end in {HANG_SECONDS:g} s: {error!r}") from error
        code = each.child.wait()
        outcome = "killed" if code == -signal.SIGKILL else {0: "ended", worker.FAILED: "refused"}.get(code, "broken")
        self.count[f"{each.task.kind} {outcome}"] += 1
        if outcome == "broken":
            lines = [line for line in read_journal(self._path) if line["event"] == "broken"]
            raise Violation(f"seed {self.seed}: {each.task} ended with {code}: {lines[-1:]}")

    def _settle(self) -> None:
        """Daemons run again, and have finished what they took over."""
        until = time.monotonic() + HANG_SECONDS
        for node in self.nodes:
            while (jobs := self._unfinished(node)) != []:
                if time.monotonic() > until:
                    raise Violation(f"seed {self.seed}: a daemon did not finish {jobs or 'and does not answer'}")
                time.sleep(0.02)

    def _unfinished(self, node: Node) -> list[object] | None:
        """The jobs of this node's daemon that are not over; None while it does not answer."""
        if not node.processes or node.processes[0].poll() is not None:  # perhaps only now: it finished its work first
            node.kill()
            node.start()
            self.count["daemons started again"] += 1
        with contextlib.suppress(HeadraceError):
            found = Sidecar.find(node.socket)
            if found is not None:
                with found:
                    jobs = found.status()["jobs"]
                    assert isinstance(jobs, dict)
                    return [job for job in jobs["jobs"] if job["state"] not in ("done", "failed", "gone")]
        return None

    def _look(self) -> Seen:
        """Everything, read with the code under test, and compared with what was saved."""
        seen = Seen()
        with open_store(self.url) as store:
            if repository.read_repo(store) is None:
                return seen
            if repository.pending_deletes(
                store
            ):  # by a collector that was killed: readers are refused until another one has been
                collect.collect(store, ())
            report = check.check(store)
            seen.problems = [f"{problem.object}: {problem.what}" for problem in report.problems]
            seen.stored = {(line.run, line.timeline, line.step, line.attempt) for line in report.steps}
            for run in repository.runs(store):
                seen.branch[run] = [self._found(store, run, base, seen) for base in repository.visible(store, run)]
            for tag in tag_records.all_tags(store):
                base = repository.find(store, tag.run, f"tag:{tag.name}")
                assert base is not None
                seen.tags[tag.name] = self._found(store, tag.run, base, seen).nonce
        self.count["steps read"] += sum(map(len, seen.branch.values()))
        return seen

    def _found(self, store: Store, run: str, base: Base, seen: Seen) -> Found:
        nonce = None
        try:
            tensors = load(store, base, run=run)
        except HeadraceError as error:
            seen.problems.append(f"{run} {base} cannot be read: {error}")
        else:
            named = {name.rpartition("/")[2]: data for name, data in tensors.items()}
            nonce = worker.nonce_of(named, base.step)
            if nonce is None:
                seen.problems.append(f"{run} {base} has { ({name: len(data) for name, data in named.items()}) }")
        return Found(base.timeline, base.step, nonce)


def cluster(folder: Path, environment: dict[str, str]) -> list[Node]:
    """Two nodes; the first has the second as its buddy."""
    certificates = make_certificates(folder / "tls", "127.0.0.1", "127.0.0.2")
    there = f"127.0.0.2:{free_port('127.0.0.2')}"
    options: list[dict[str, object]] = [
        {"buddy": there, **tls_files(certificates, "127.0.0.1")},
        {"buddy_listen": there, "buddy_names": "127.0.0.1", **tls_files(certificates, "127.0.0.2")},
    ]
    made = []
    for number, each in enumerate(options):
        place = folder / f"n{number}"
        place.mkdir(mode=0o700)
        made.append(Node(place, {**os.environ, **environment, "NODE": str(place)}, each))
    for node in reversed(made):
        node.start()
    return made


@contextlib.contextmanager
def place(server: S3Server | None, nodes: bool) -> Iterator[History]:
    """A history that has not begun, in a folder of its own, with its nodes and its store."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="mrh-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment, proxy, url = dict[str, str](), None, f"file://{folder / 'store'}"
        if server is not None:
            proxy = stack.enter_context(FaultProxy(server.endpoint))
            environment = server.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint}
            url = f"s3://headrace/{folder.name}"
        history = History(url, folder / "history", 0, proxy=proxy, environment=environment)
        if nodes:
            history.nodes = cluster(folder, environment)
            stack.callback(lambda: [node.kill() for node in history.nodes])
        try:
            yield history
        except Violation:
            for name in ("history", "store"):
                if (folder / name).exists():
                    shutil.copytree(folder / name, Path(f"{folder}-kept", name))
            print(f"the journal, and a store in a directory, are kept in {folder}-kept", flush=True)
            raise


def run(seed: int, server: S3Server | None, rounds: int = ROUNDS, until: float = float("inf")) -> Counter[str]:
    """The history of one seed; what happened in it."""
    with place(server, nodes=seed % 3 != 0) as history:
        history.seed, history._draw = seed, random.Random(seed)
        for _ in range(rounds):
            history.round()
            if time.monotonic() > until:
                break
        lines = read_journal(history._path)
        for event in ("saving", "staged", "committed", "tagged", "read"):
            history.count[event] += sum(line["event"] == event for line in lines)
        for line in lines:
            if line["event"] in ("error", "failed"):
                history.count[f"{line['event']}: {line['code']}: {line['message'].partition(':')[0][:60]}"] += 1
        marks = history.folder / "marks"
        history.count["killed at a named point"] += len(marks.read_text().split()) if marks.exists() else 0
        if history.proxy is not None:
            for fault, times in history.proxy.fired.items():
                history.count[f"store fault: {fault.name}"] += times
        return history.count


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Draw histories for a while and judge each of them.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="on a real S3 server, with faults on the way to it")
    options = parser.parse_args(arguments)
    until, seed, count = time.monotonic() + 60 * options.minutes, options.seed, Counter[str]()
    with contextlib.ExitStack() as stack:
        server = None
        if options.s3:
            server = stack.enter_context(start_seaweedfs())
            server.create_bucket("headrace")
            os.environ.update(server.environment())
        while time.monotonic() < until:
            count += run(seed, server, until=until)
            count["histories"] += 1
            print(f"seed {seed} is right; {count['rounds']} rounds, {count['committed']} commits so far", flush=True)
            seed += 1
    for name, times in sorted(count.items()):
        print(f"{times:8}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
