"""A model of reads, saves and failures of a training job on a cluster.

Costs follow from steady rates. Goodput follows from a simulation of saves, interruptions and restarts. Tests compare
the costs with a discrete-event model of one node (`tests/support/node_model.py`), and that model with real runs.

Sources: checkpoint sizes by number of processes are those of the MLPerf Storage rules v2.0, table 2 (8B, 70B, 405B, 1T;
unofficial use). The rate of interruptions is from "The Llama 3 Herd of Models" (arXiv:2407.21783, section 3.3.4):
419 unexpected interruptions in 54 days on 16,384 GPUs, of which 78 % were caused by hardware. Everything else is a
setting.

Goodput is the share of wall time that was spent on work that the final model contains. An interruption loses all
work since the last durable checkpoint. Stalls and restarts are time without work. A save first stalls the steps, then
runs during them. The next save begins when the last one is in the store. With the sidecar, a software failure does not
lose a staged save.

Invariants: the result is deterministic for a seed. Work, lost work and pauses add up to the wall time.

Failure behaviour: an interval that is not positive is a `ValueError`.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.loaders.sampling.order import Order

GPU_MTBF_SECONDS = 54 * 86400 * 16384 / 419
"""Mean time between interruptions of one GPU's share of a job: about 5.8 years."""
_SAMPLES = 100_000
"""The smallest number of samples in the order that `amplification` examines. It is enough for all lanes."""
_SIZES = ((8, 105e9), (64, 912e9), (512, 5.29e12), (1 << 30, 18e12))


@dataclass(frozen=True)
class Cluster:
    """A cluster. Rates are in bytes per second, times in seconds.

    `store_requests` is the number of requests that the store serves per second.
    """

    gpus: int
    gpus_a_node: int = 8
    nic_rate: float = 25e9
    store_read: float = 400e9
    store_write: float = 200e9
    store_requests: float = 200_000
    d2h_rate: float = 25e9
    tier_write: float = 5e9
    tier_read: float = 10e9
    gpu_mtbf: float = GPU_MTBF_SECONDS
    hardware_share: float = 0.78
    restart_seconds: float = 180.0

    @property
    def nodes(self) -> int:
        return max(1, math.ceil(self.gpus / self.gpus_a_node))

    @property
    def mtbf(self) -> float:
        """Seconds between interruptions of the job."""
        return self.gpu_mtbf / self.gpus


@dataclass(frozen=True)
class Job:
    """One training job: the compute time of a step, the bytes that a GPU reads for it, and the size of a checkpoint.

    `changed` is the share of a checkpoint's bytes that are new since the last one. `slow_down` is the share by which an
    upload slows the steps that run during it.
    """

    step_seconds: float = 1.0
    sample_bytes: float = 4e6
    batch: int = 8
    block_bytes: float = 4 << 20
    state_bytes: float = 0.0
    changed: float = 0.6
    stage_efficiency: float = 0.5
    slow_down: float = 0.02
    cached: float = 0.0

    def sized(self, gpus: int) -> Job:
        """Return the job with the checkpoint size that the rules give for `gpus` processes, unless a size is set."""
        if self.state_bytes:
            return self
        return replace(self, state_bytes=next(size for most, size in _SIZES if gpus <= most))


@dataclass(frozen=True)
class Features:
    """The parts of Headrace in use.

    Without any of them, each rank reads all its data itself, and a save in progress is lost if its trainer fails.
    """

    name: str
    sidecar: bool = False
    dedup: bool = False
    tier: bool = False


VARIANTS = (
    Features("sidecar + dedup + local tier", sidecar=True, dedup=True, tier=True),
    Features("sidecar + dedup", sidecar=True, dedup=True),
    Features("sidecar", sidecar=True),
    Features("none"),
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of one job on one cluster, in seconds except for `amplification` and `data_stall` (share of wall time).

    `durable` is the time from the start of a save until it survives the loss of a node. `upload` is the time until the
    store has the save. The next save waits for the upload, because the nodes' tiers would fill up otherwise.
    """

    amplification: float
    data_stall: float
    stall: float
    durable: float
    upload: float
    slow_down: float
    restore: float
    mtbf: float
    soft_survives: bool


@functools.cache
def amplification(
    gpus: int, gpus_a_node: int, batch: int, sample_bytes: float, block_bytes: float, *, shared: bool
) -> float:
    """Compute the read amplification: the bytes that a node fetches divided by the bytes that its ranks need.

    The epoch is in the loaders' own order. Readers fetch whole blocks. A reader fetches a block once for all of its
    samples in the block. With `shared`, the reader is the node (with the daemon), otherwise each rank. The result is
    computed for at most two nodes, which represent all. `batch` is the batch size of one rank.
    """
    everywhere = batch * gpus
    order = Order.of(max(_SAMPLES, 2 * everywhere), everywhere, sample_bytes=sample_bytes)
    batches = np.arange(order.full_batches, dtype=np.int64)[:, None] * everywhere
    fetched = needed_bytes = 0.0
    nodes = max(1, math.ceil(gpus / gpus_a_node))
    for node in {0, nodes // 2}:
        ranks = range(node * gpus_a_node, min(gpus, (node + 1) * gpus_a_node))
        samples_of_ranks = [order.take(0, (batches + order.slots(0, rank, gpus)).ravel()) for rank in ranks]
        readers = [np.concatenate(samples_of_ranks)] if shared else samples_of_ranks
        fetched += block_bytes * sum(_blocks(samples, sample_bytes, block_bytes) for samples in readers)
        needed_bytes += sample_bytes * sum(samples.size for samples in samples_of_ranks)
    return fetched / needed_bytes


def _blocks(samples: npt.NDArray[np.int64], sample_bytes: float, block_bytes: float) -> int:
    """Count the blocks that hold these samples. Samples are stored one after the other."""
    first = np.floor(samples * sample_bytes / block_bytes).astype(np.int64)
    last = np.floor(((samples + 1) * sample_bytes - 1) / block_bytes).astype(np.int64)
    most = int((last - first).max())
    return int(np.unique(np.concatenate([np.minimum(first + more, last) for more in range(most + 1)])).size)


def costs(cluster: Cluster, job: Job, features: Features) -> Costs:
    """Compute the costs from steady rates.

    All nodes do the same at the same time, so each gets an equal share of the store.
    """
    job = job.sized(cluster.gpus)
    ranks = min(cluster.gpus, cluster.gpus_a_node)
    amplified = amplification(
        cluster.gpus, cluster.gpus_a_node, job.batch, job.sample_bytes, job.block_bytes, shared=features.sidecar
    )
    read = min(
        cluster.nic_rate,
        cluster.store_read / cluster.nodes,
        cluster.store_requests * job.block_bytes / cluster.nodes,
    )
    need = ranks * job.batch * job.sample_bytes * amplified * (1 - job.cached) / job.step_seconds
    node_state = job.state_bytes / cluster.nodes
    written = node_state * (job.changed if features.dedup else 1.0)
    upload = written / min(cluster.nic_rate, cluster.store_write / cluster.nodes)
    stall = job.state_bytes / cluster.gpus / (cluster.d2h_rate * job.stage_efficiency)
    # The tier holds the node's own bytes and those of its buddy, in case the buddy is lost.
    # A save counts after both writes.
    tier_seconds = max(2 * written / cluster.tier_write, written / cluster.nic_rate)
    durable = min(tier_seconds, upload) if features.tier else upload
    # All nodes wait for the slowest: a new node, which reads its bytes from its buddy.
    from_buddy, from_store = node_state / min(cluster.tier_read, cluster.nic_rate), node_state / read
    return Costs(
        amplification=amplified,
        data_stall=max(0.0, 1 - read / need),
        stall=stall,
        durable=stall + durable,
        upload=upload,
        slow_down=job.slow_down * upload,
        restore=min(from_buddy, from_store) if features.tier else from_store,
        mtbf=cluster.mtbf,
        soft_survives=features.sidecar,
    )


def young(cost: float, mtbf: float) -> float:
    """Return the optimal seconds between checkpoints, to first order.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Return the optimal seconds of computing between checkpoints, to higher order.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006,
    equation 37.
    """
    if cost >= 2 * mtbf:
        return mtbf
    x = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - cost


@dataclass
class Outcome:
    """The seconds of a run's wall time by kind, the number of staged `saves`, and the number of `interruptions`."""

    useful: float = 0.0
    lost: float = 0.0
    stalled: float = 0.0
    slowed: float = 0.0
    waiting: float = 0.0
    down: float = 0.0
    saves: int = 0
    interruptions: int = 0

    @property
    def wall(self) -> float:
        return self.useful + self.lost + self.stalled + self.slowed + self.waiting + self.down

    @property
    def goodput(self) -> float:
        return self.useful / self.wall


def simulate_job(cluster: Cluster, job_costs: Costs, interval: float, *, wall: float, seed: int) -> Outcome:
    """Run the job for `wall` seconds, with a checkpoint after every `interval` seconds of computing."""
    if interval <= 0:
        raise ValueError("the interval between checkpoints is a positive number of seconds")
    rng, out = random.Random(seed), Outcome()
    run = _Run(cluster=cluster, job_costs=job_costs, interval=interval, rng=rng, out=out)
    while out.wall < wall:
        run.life(wall)
    return out


class _Run:
    """Simulates the job from a start to its next interruption."""

    def __init__(
        self, *, cluster: Cluster, job_costs: Costs, interval: float, rng: random.Random, out: Outcome
    ) -> None:
        self._cluster, self._costs, self._interval, self._rng, self._out = cluster, job_costs, interval, rng, out

    def life(self, wall: float) -> None:
        """Compute and save in cycles until the interruption or the end of the run."""
        out, job_costs = self._out, self._costs
        time_left = min(self._rng.expovariate(1 / job_costs.mtbf), wall - out.wall)
        interrupted = time_left < wall - out.wall
        durable_work, work_in_save, clock, durable_at = 0.0, 0.0, 0.0, 0.0
        # The last save must be in the store before the next one begins.
        cycle = max(self._interval, job_costs.durable - job_costs.stall, job_costs.upload)
        while True:
            slowed = min(job_costs.slow_down, cycle)
            cycle_time = cycle / (1 - job_costs.data_stall) + slowed
            if clock + cycle_time > time_left:
                self._interrupt(time_left - clock, durable_work, work_in_save, durable_at <= time_left, interrupted)
                return
            clock += cycle_time
            out.waiting += cycle_time - slowed - cycle
            out.slowed += slowed
            durable_work, work_in_save = durable_work + work_in_save, cycle
            if clock + job_costs.stall > time_left:
                out.stalled += time_left - clock
                self._lose(durable_work, work_in_save, staged=False, interrupted=interrupted)
                return
            clock += job_costs.stall
            out.stalled += job_costs.stall
            out.saves += 1
            durable_at = clock + job_costs.durable - job_costs.stall

    def _interrupt(
        self, partial: float, durable_work: float, work_in_save: float, durable: bool, interrupted: bool
    ) -> None:
        """End this part of the run while the job computes.

        An interruption loses the work since the last save, and the last save too if it does not survive.
        """
        out, job_costs = self._out, self._costs
        work = partial * (1 - job_costs.data_stall)
        out.waiting += partial - work
        if interrupted:
            out.lost += work
        else:
            out.useful += work
        self._lose(durable_work, work_in_save, staged=True, interrupted=interrupted, durable=durable)

    def _lose(
        self, durable_work: float, work_in_save: float, *, staged: bool, interrupted: bool, durable: bool = False
    ) -> None:
        """Count the kept and the lost work. The save of `work_in_save` may not be durable yet."""
        out, job_costs, cluster = self._out, self._costs, self._cluster
        survives = not interrupted or durable
        if interrupted:
            out.interruptions += 1
            hardware = self._rng.random() < cluster.hardware_share
            survives = survives or (staged and job_costs.soft_survives and not hardware)
            out.down += cluster.restart_seconds + job_costs.restore
        out.useful += durable_work + (work_in_save if survives else 0.0)
        out.lost += 0.0 if survives else work_in_save


def best_interval(cluster: Cluster, job_costs: Costs, *, wall: float, seeds: range) -> tuple[float, list[float]]:
    """Try intervals around Daly's. Return the one with the highest mean goodput, and its goodput for each seed."""
    start = max(daly(job_costs.stall + job_costs.slow_down, job_costs.mtbf), 1.0)
    tried = {
        interval: [simulate_job(cluster, job_costs, interval, wall=wall, seed=seed).goodput for seed in seeds]
        for interval in (start * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0))
    }
    best = max(tried, key=lambda interval: sum(tried[interval]))
    return best, tried[best]
