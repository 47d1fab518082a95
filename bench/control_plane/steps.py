"""Measures a repository of many steps: the search for the latest step, and retention after a commit, in virtual time.

Each step has its COMMIT, its decision and one pack. To save memory, only the steps that retention removes have the
manifests and packs of all ranks. So the figures of retention are too low for jobs of more than 1,000 ranks: listings of
the new step, and of the packs of up to `collect.AT_ONCE` steps, would take a second page. The first retention lists the
objects of every step. CPU time passes as virtual time.

    python -m headrace.bench.control_plane.steps STEPS RANKS [LATENCY] [--best]

With `--best`, each step has metadata of five values, and retention also keeps the three best steps. The listing of all
steps with their metadata is measured in any case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.bench.control_plane.state import RUN
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Commit, Decision, Newest, Repo, Timeline, Totals, encode, this_process
from headrace.checkpoint.format.metadata import JsonValue
from headrace.checkpoint.repository import collect, group_commit, inventory, steps, survey
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.testing.simulation.scheduler import Process, Simulation
from headrace.dataio.testing.simulation.store import Bucket, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched

_STEP = 100
"""A step is saved after this many steps of training."""
_DIGEST = "0" * 64


@dataclass
class Cost:
    """The seconds and the requests of an operation."""

    seconds: float
    requests: int


class Repository:
    """A run with `count` steps of `ranks` ranks, on a store that answers after `latency` seconds."""

    def __init__(self, count: int, ranks: int, latency: float, best: bool = False) -> None:
        self.ranks, self.best = ranks, best
        self.simulation = Simulation(1, charge_cpu=True)
        self.bucket = Bucket(self.simulation, latency=latency)
        self.store, self.clock = SimulatedStore(self.bucket), self.simulation.clock
        self._steps = 0
        self._put(names.REPO, encode(Repo(id=names.new_id(self.clock), created=0.0)))
        opened = Timeline(run=RUN, timeline=1, parent=None, created=0.0, process=this_process())
        self._put(names.timeline(RUN, 1), encode(opened))
        for _ in range(count):
            self.add()

    def add(self) -> None:
        """Add one committed step. Only the first three steps have the objects of all ranks."""
        self._steps += 1
        attempt = Attempt(RUN, 1, self._steps * _STEP, names.new_id(self.clock), self.ranks)
        for rank in range(self.ranks if self._steps <= 3 else 1):
            self._put(names.pack(attempt.id, names.pack_name(rank, "0" * 8, 0)), b"-")
            if self._steps <= 3:
                self._put(attempt.manifest_key(rank), b"-")
        self._put(attempt.decision_key, encode(self._decision(attempt)))
        self._put(attempt.commit_key, encode(Commit(step=attempt.step, attempt=attempt.id, committed=0.0)))
        self._put(names.newest(RUN, 1), encode(Newest(step=attempt.step)))

    def _decision(self, attempt: Attempt) -> Decision:
        totals = Totals(
            ranks=self.ranks,
            tensors=self.ranks,
            packs=self.ranks,
            attempts=(),
            bytes_state=self.ranks,
            bytes_written=self.ranks,
            bytes_deduplicated=0,
        )
        grouped, base = names.is_grouped(self.ranks), Decision(attempt=attempt.id, outcome="commit")
        return Decision(
            version=Decision.newest if grouped else base.version,
            attempt=attempt.id,
            outcome="commit",
            manifests=() if grouped else (_DIGEST,) * self.ranks,
            groups=(_DIGEST,) * names.group_count(self.ranks) if grouped else (),
            world_size=self.ranks if grouped else 0,
            group_ranks=names.GROUP_RANKS if grouped else 0,
            totals=totals,
            metadata=self._metadata() if self.best else {},
        )

    def _metadata(self) -> dict[str, JsonValue]:
        """The loss falls slowly, so the newest steps are the best, as in training."""
        step = self._steps * _STEP
        return {"loss": 10 / (step + 1), "tokens": step * 4096, "lr": 1e-3, "grad_norm": 1.5, "note": "training"}

    def _put(self, key: str, body: bytes) -> None:
        self.bucket.apply_put(key, body)

    def cost(self, work: Callable[[], object]) -> Cost:
        """Run `work` in a simulated process and return its cost."""
        before, requests = self.simulation.now, sum(self.bucket.requests.values())
        task = self.simulation.start(work, process=Process("measured"))
        with patched(self.simulation, inventory, group_commit):
            self.simulation.run()
        if task.error is not None:
            raise task.error
        return Cost(self.simulation.now - before, sum(self.bucket.requests.values()) - requests)

    def latest(self) -> None:
        """Find the latest step."""
        base = steps.find(self.store, RUN, "latest")
        if base is None or base.step != self._steps * _STEP:
            raise AssertionError(f"found {base}, not step {self._steps * _STEP}")

    def list(self) -> None:
        """List all steps with their metadata."""
        report = survey.survey(self.store, RUN, self.clock)
        if len(report.steps) != self._steps or bool(report.steps[0].metadata) != self.best:
            raise AssertionError(f"{len(report.steps)} steps were listed")

    def log(self) -> None:
        """Read all steps with their metadata, newest first."""
        if sum(1 for _ in survey.newest_first(self.store, RUN)) != self._steps:
            raise AssertionError("not all steps were read")

    def retain(self, collector: collect.Collector, last: int) -> None:
        """Remove the one step that the policy does not keep."""
        keep = Keep(last=last, best=("loss", 3, "min") if self.best else ())
        plan = collect.retain(self.store, RUN, keep, self.clock, collector)
        if plan is None or len(plan.tombstones) != 1 or len(plan.objects) < 2 * self.ranks:
            raise AssertionError(f"retention did not remove exactly one step with all its objects: {plan}")


def measure(count: int, ranks: int, latency: float, best: bool = False) -> dict[str, float]:
    """The figures of a repository of `count` steps."""
    repository = Repository(count, ranks, latency, best)
    latest = repository.cost(repository.latest)
    listing = repository.cost(repository.list)
    log = repository.cost(repository.log)
    collector = collect.Collector(repository.store, collect.AT_ONCE)
    first = repository.cost(lambda: repository.retain(collector, count - 1))
    repository.add()
    after_commit = repository.cost(lambda: repository.retain(collector, count - 1))
    return {
        "latest_s": round(latest.seconds, 3),
        "latest_requests": latest.requests,
        "listing_s": round(listing.seconds, 3),
        "listing_requests": listing.requests,
        "log_s": round(log.seconds, 3),
        "log_requests": log.requests,
        "first_retention_s": round(first.seconds, 3),
        "first_retention_requests": first.requests,
        "retention_s": round(after_commit.seconds, 3),
        "retention_requests": after_commit.requests,
    }


def main(words: Sequence[str]) -> None:
    """Print the figures as JSON."""
    count, ranks, *latency = [word for word in words if word != "--best"]
    print(json.dumps(measure(int(count), int(ranks), float(latency[0]) if latency else 0.02, "--best" in words)))


if __name__ == "__main__":
    main(sys.argv[1:])
