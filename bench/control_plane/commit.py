"""Measures the saves of a large job, from the staged state to COMMIT: real code of all ranks, in virtual time.

By default, each rank has as many tensors as in the model of `headrace.bench.control_plane.state`, but each tensor has
only one byte. So manifests are as large as in a real job, and uploads take no time. With one tensor a rank, a job of
16,384 ranks fits into memory. CPU time passes as virtual time, with one core for each rank. All ranks end their uploads
within two seconds.

    python -m headrace.bench.control_plane.commit RANKS [LATENCY [TENSORS]]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.control_plane.state import NAMES, RUN, document
from headrace.checkpoint.format import chunking, group, names
from headrace.checkpoint.format.chunking import Box, TensorSpec
from headrace.checkpoint.format.documents import Base, Repo, encode
from headrace.checkpoint.repository import fetch, group_commit, inventory, lease, timeline
from headrace.checkpoint.saving import plan
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.executor import own_manifest_of
from headrace.checkpoint.saving.plan import OwnManifest
from headrace.checkpoint.saving.progress import ProgressFile
from headrace.dataio.testing.simulation.scheduler import Process, Simulation
from headrace.dataio.testing.simulation.store import Bucket, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched

UPLOADS_WITHIN = 2.0
"""Seconds in which all ranks end their uploads."""
_TIMEOUT = 600.0


def specs_of(rank: int, ranks: int, tensors: Sequence[str]) -> list[TensorSpec]:
    """One byte of each tensor."""
    return [TensorSpec(name, "uint8", Box((ranks,), (rank,), (1,)), True) for name in tensors]


@dataclass
class Save:
    """What a save of all ranks took: its requests, and seconds from the last manifest until COMMIT.

    `seen_seconds`: seconds from the last manifest until the last rank has seen COMMIT.
    """

    base: Base
    requests: int
    commit_seconds: float
    seen_seconds: float


class Job:
    """A job of `ranks` ranks on a store that answers after `latency` seconds. `tensors`: the names of the tensors."""

    def __init__(self, ranks: int, latency: float, tensors: Sequence[str]) -> None:
        self.ranks, self._tensors, self._draw = ranks, tensors, random.Random(1)
        self.simulation = Simulation(1, charge_cpu=True)
        self.bucket = Bucket(self.simulation, latency=latency)
        self.store, self.clock = SimulatedStore(self.bucket), self.simulation.clock
        self._puts: list[tuple[float, str]] = []
        self._own_manifests: dict[int, OwnManifest | None] = {}
        self.bucket.watch = self._watch
        self.bucket.apply_put(names.REPO, encode(Repo(id=names.new_id(self.clock), created=0.0)))
        self.simulation.start(timeline.open_timeline, self.store, RUN, None, self.clock)
        self._run()
        shares = [group.share_digest(specs_of(rank, ranks, tensors)) for rank in range(ranks)]
        self._plan = group.plan_digest(shares) if names.is_grouped(ranks) else b""
        self._tree = document(tensors)

    def save(self, step: int, bases: tuple[Base, ...] = ()) -> Save:
        """Let all ranks save the step."""
        attempt, before = names.new_id(self.clock), sum(self.bucket.requests.values())
        self._puts.clear()
        for rank in range(self.ranks):
            begins = self._draw.uniform(0, UPLOADS_WITHIN)
            self.simulation.start(self._save, rank, step, attempt, bases, at=begins, process=Process(str(rank)))
        self._run()
        last = max(at for at, key in self._puts if key.endswith(".manifest"))
        committed = min(at for at, key in self._puts if key.endswith("/COMMIT"))
        requests = sum(self.bucket.requests.values()) - before
        return Save(Base(1, step, attempt), requests, committed - last, self.simulation.now - last)

    def _save(self, rank: int, step: int, attempt: str, bases: tuple[Base, ...]) -> None:
        specs = specs_of(rank, self.ranks, self._tensors)
        place = chunking.lay_out(specs)
        arena = memoryview(bytearray(step.to_bytes(4, "big") * (place.total // 4 + 1)))[: place.total]
        planned = plan.PutPlan(
            location=plan.PlanLocation(self.store.location.url, {}),
            run=RUN,
            timeline=1,
            step=step,
            attempt=attempt,
            rank=rank,
            world_size=self.ranks,
            bases=bases,
            tensors=plan.plan_tensors(specs, place),
            small_bytes=place.small_bytes,
            tree=self._tree,
            replicas=self._plan,
            commit_timeout=_TIMEOUT,
            lease_seconds=60.0,
            own_manifest=self._own_manifests.get(rank),
        )
        progress = ProgressFile(None)
        result = commit_staged(arena, planned, lambda _: None, store=self.store, progress=progress, clock=self.clock)
        self._own_manifests[rank] = own_manifest_of(result, progress.manifest)

    def _run(self) -> None:
        """Run the tasks that were started to their end, and raise the first error of one."""
        with patched(self.simulation, lease, fetch, inventory, group_commit):
            self.simulation.run()
        errors = [task.error for task in self.simulation.tasks if task.error is not None]
        self.simulation.tasks.clear()
        if errors:
            raise errors[0]

    def _watch(self, operation: str, key: str, now: float) -> None:
        if operation == "PUT":
            self._puts.append((now, key))


def measure(ranks: int, latency: float = 0.02, tensors: int | None = None) -> dict[str, float]:
    """Measure a first save, and a second save that references it.

    Args:
        ranks: The number of ranks.
        latency: Seconds until the store answers a request.
        tensors: The number of tensors of each rank. None: all tensors of the model.
    """
    job = Job(ranks, latency, NAMES[:tensors])
    first = job.save(1)
    later = job.save(2, (first.base,))
    return {
        "ranks": ranks,
        "requests": first.requests,
        "later_requests": later.requests,
        "commit_seconds": round(max(first.commit_seconds, later.commit_seconds), 3),
        "seen_seconds": round(max(first.seen_seconds, later.seen_seconds), 3),
    }


if __name__ == "__main__":
    ranks, latency, tensors = (sys.argv[1:] + ["0.02", "0"][len(sys.argv) - 2 :])[:3]
    print(json.dumps(measure(int(ranks), float(latency), int(tensors) or None)))
