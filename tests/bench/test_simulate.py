"""The model: right where the answer is known, and close to real runs of 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.core.processes import daemon, server
from headrace.bench.core.results import decode
from headrace.bench.workloads import cluster_model, simulate
from headrace.bench.workloads.cluster_model import (
    VARIANTS,
    Cluster,
    Costs,
    Job,
    best_interval,
    costs,
    daly,
    simulate_job,
    young,
)
from headrace.bench.workloads.sidecar_rank import RankJob, Shape, run_ranks, write_shards
from headrace.dataio.cache.readers.bypass import MAX_BYTES
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import CACHE_BLOCK_BYTES
from headrace.loaders.sampling.order import Order
from tests.support import node_model as model
from tests.support.node_model import Latch, Link, Process, Simulation, SimulationError, Sleep, Transfer

RATE = 10e6
SHAPE = Shape(shards=2, per_shard=16)
TOLERANCE = 0.15
"""Of the predicted seconds; the runs are bounded by a server of known bandwidth, so a busy machine matters little."""

SLACK = 0.3
"""Seconds that processes may take to notice each other."""


def moved(flows: list[tuple[float, list[Link]]]) -> list[float]:
    """When each of these flows ends, all begun at 0."""
    simulation, ends = Simulation(), [0.0] * len(flows)

    def one(number: int) -> Process:
        yield Transfer(*flows[number])
        ends[number] = simulation.now

    for number in range(len(flows)):
        simulation.start(one(number))
    simulation.run()
    return ends


def test_flows_share_a_link_and_speed_up_when_others_end() -> None:
    link = Link("l", 10)
    assert moved([(10, [link]), (30, [link])]) == pytest.approx([2, 4])
    assert link.carried == pytest.approx(40)


def test_a_flow_that_is_held_elsewhere_leaves_its_share_to_others() -> None:
    store, slow, fast = Link("store", 10), Link("nic", 2), Link("nic", 100)
    assert moved([(20, [store, slow]), (80, [store, fast])]) == pytest.approx([10, 10])


@given(st.lists(st.tuples(st.floats(1, 1e3), st.sets(st.integers(0, 3), min_size=1)), min_size=1, max_size=6))
def test_bytes_are_conserved_and_no_link_carries_more_than_it_can(flows: list[tuple[float, set[int]]]) -> None:
    links = [Link(str(number), 1.0 + number) for number in range(4)]
    ends = moved([(size, [links[number] for number in sorted(on)]) for size, on in flows])
    for number, link in enumerate(links):
        due = sum(size for size, on in flows if number in on)
        assert link.carried == pytest.approx(due, rel=1e-3, abs=1e-3)
        assert link.carried <= link.rate * max(ends) * (1 + 1e-6) + 1e-3


def test_processes_that_wait_for_each_other_are_an_error_and_so_is_a_run_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stuck() -> Process:
        yield Latch()

    simulation = Simulation()
    simulation.start(stuck())
    with pytest.raises(SimulationError, match="1 processes wait"):
        simulation.run()

    def endless() -> Process:
        while True:
            yield Sleep(1)

    monkeypatch.setattr(model, "MAX_EVENTS", 100)
    simulation = Simulation()
    simulation.start(endless())
    with pytest.raises(SimulationError, match="more than 100 events"):
        simulation.run()


@pytest.mark.parametrize("gpus", [8, 512])
def test_a_node_that_shares_reads_less_than_its_ranks_alone_and_never_less_than_all(gpus: int) -> None:
    for size in (5e5, 4e6):
        together, alone = (
            cluster_model.amplification(gpus, 8, 8, size, 4 << 20, shared=shared) for shared in (True, False)
        )
        assert 1 <= together < alone < 8
        assert (together < 1.01) == (gpus == 8), (
            "one node reads each block once; of several, those at the edges of chunks twice"
        )


def test_amplification_is_that_of_the_blocks_that_the_order_gives_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_model, "_SAMPLES", 1000)
    order = Order.of(1000, 16, sample_bytes=3e6)
    touched: list[set[int]] = [set(), set()]
    for number in range(order.full_batches):
        for rank in range(2):
            for sample in order.batch_of(0, number, rank, 2).tolist():
                touched[rank] |= set(range(int(sample * 3e6 // 4e6), int(((sample + 1) * 3e6 - 1) // 4e6) + 1))
    found = cluster_model.amplification.__wrapped__(2, 2, 8, 3e6, 4e6, shared=False)
    assert found == pytest.approx(sum(map(len, touched)) * 4e6 / (order.full_batches * 16 * 3e6))
    found = cluster_model.amplification.__wrapped__(2, 2, 8, 3e6, 4e6, shared=True)
    assert found == pytest.approx(len(touched[0] | touched[1]) * 4e6 / (order.full_batches * 16 * 3e6))


@pytest.fixture(scope="module")
def node() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        write_shards(Path(folder) / "store" / "bucket" / "ds", SHAPE)
        write_shards(Path(folder) / "store" / "bucket" / "other", Shape(shards=1, per_shard=1))
        yield Path(folder)


def real(node: Path, ranks: int, *, shared: bool, place: str = "0") -> tuple[float, float]:
    """(seconds, bytes the server sent) of real ranks at a server of `RATE`."""
    with server(node / "store", RATE) as limited:
        if not shared:
            jobs = [RankJob("s3://bucket/ds", None, SHAPE, rank=rank, ranks=ranks, batch=4) for rank in range(ranks)]
            seconds, _ = run_ranks(jobs, limited.environ)
            return seconds, limited.sent()
        with daemon(node / place / f"d{ranks}", limited.environ, cache_bytes="1GiB") as running:
            warm = RankJob("s3://bucket/other", str(running.socket), Shape(shards=1, per_shard=1))
            run_ranks([warm], limited.environ)
            before, socket = limited.sent(), str(running.socket)
            jobs = [RankJob("s3://bucket/ds", socket, SHAPE, rank=rank, ranks=ranks, batch=4) for rank in range(ranks)]
            seconds, _ = run_ranks(jobs, limited.environ)
            return seconds, limited.sent() - before


def predicted(ranks: int, *, shared: bool, pieces: model.ReadCosts) -> model.Prediction:
    """The same reads, in the same order, in the model."""
    epochs = []
    for rank in range(ranks):
        batches = []
        for batch in RankJob("s3://bucket/ds", None, SHAPE, rank=rank, ranks=ranks, batch=4).batches():
            ranges = ((key, offset, length) for key, found in batch for offset, length in found)
            batches.append((model.blocks_of(ranges, CACHE_BLOCK_BYTES), len(batch)))
        epochs.append(model.Epoch(batches))
    shards = {SHAPE.read(number * SHAPE.per_shard)[0] for number in range(SHAPE.shards)}
    sizes = {
        (shard, number): float(min(CACHE_BLOCK_BYTES, SHAPE.shard_bytes - number * CACHE_BLOCK_BYTES))
        for shard in shards
        for number in range(math.ceil(SHAPE.shard_bytes / CACHE_BLOCK_BYTES))
    }
    return model.predict(epochs, sizes, store_rate=RATE, shared=shared, pieces=pieces)


@pytest.fixture(scope="module")
def pieces(node: Path) -> model.ReadCosts:
    """What one rank costs on this machine now, in addition to its bytes: the model's only measured number."""
    seconds, sent = real(node, 1, shared=False)
    return model.ReadCosts(sample_seconds=0, start_seconds=max(0.0, seconds - sent / RATE))


@pytest.mark.parametrize("shared", [True, False], ids=["sidecar", "alone"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 4])
def test_predictions_for_local_ranks_are_close_to_real_runs(
    node: Path, pieces: model.ReadCosts, ranks: int, shared: bool
) -> None:
    expected = predicted(ranks, shared=shared, pieces=pieces)
    twice = 0 if shared else ranks * MAX_BYTES  # what a rank wants first may come by itself, and again with its block
    for attempt in range(8):  # what else the machine does can only make a run slower
        (node / f"{attempt}").mkdir(exist_ok=True)
        seconds, sent = real(node, ranks, shared=shared, place=str(attempt))
        assert 0.98 * expected.fetched <= sent <= 1.02 * expected.fetched + twice
        if seconds <= expected.seconds + max(SLACK, TOLERANCE * expected.seconds):
            break
    assert seconds == pytest.approx(expected.seconds, rel=TOLERANCE, abs=SLACK)


KNOWN = Costs(
    amplification=1,
    data_stall=0,
    stall=10,
    durable=60,
    upload=0,
    slow_down=1,
    restore=30,
    mtbf=20_000,
    soft_survives=False,
)


def test_without_interruptions_only_stalls_cost() -> None:
    out = simulate_job(Cluster(8), replace(KNOWN, mtbf=1e15), 990, wall=1e7, seed=1)
    assert out.goodput == pytest.approx(990 / 1001, rel=1e-3)
    assert out.interruptions == 0


@given(st.floats(1e3, 1e6), st.floats(10, 1e5), st.floats(0, 0.9), st.integers(0, 5))
def test_every_second_is_accounted_for(mtbf: float, interval: float, data_stall: float, seed: int) -> None:
    known = replace(KNOWN, mtbf=mtbf, data_stall=data_stall)
    out = simulate_job(Cluster(8), known, interval, wall=1e6, seed=seed)
    assert out.wall == pytest.approx(1e6, rel=1e-6) or out.wall - 1e6 <= 180 + 30 + 1e-6
    assert min(out.useful, out.lost, out.stalled, out.slowed, out.waiting, out.down) >= 0
    assert 0 <= out.goodput <= 1


def test_goodput_is_near_the_closed_form_at_the_interval_of_daly() -> None:
    """Without restart cost the wall time by Daly's equation 20 is M·exp(R/M)·(exp((t+C)/M) − 1)·W/t."""
    known = replace(KNOWN, durable=10, slow_down=0, restore=0)
    cluster = Cluster(8, restart_seconds=0)
    t, m, c = daly(10, known.mtbf), known.mtbf, 10
    expected = t / (m * math.expm1((t + c) / m))
    found = [simulate_job(cluster, known, t, wall=4e7, seed=seed).goodput for seed in range(3)]
    assert sum(found) / 3 == pytest.approx(expected, rel=0.01)


def test_the_best_interval_lies_around_that_of_young_and_daly() -> None:
    best, goodput = best_interval(Cluster(8), KNOWN, wall=2e7, seeds=range(3))
    assert young(11, KNOWN.mtbf) / 2.5 < best < young(11, KNOWN.mtbf) * 2.5
    assert young(11, 20_000) == pytest.approx(663, rel=0.01)
    assert len(goodput) == 3


def test_a_staged_save_outlives_software_failures_only_with_the_sidecar() -> None:
    soft = Cluster(8, hardware_share=0)
    slow = replace(KNOWN, durable=2000, mtbf=6000)
    plain = simulate_job(soft, slow, 100, wall=1e7, seed=1)
    assert simulate_job(soft, replace(slow, soft_survives=True), 100, wall=1e7, seed=1).goodput > plain.goodput + 0.05
    hard = Cluster(8, hardware_share=1)
    assert simulate_job(hard, replace(slow, soft_survives=True), 100, wall=1e7, seed=1).goodput == pytest.approx(
        simulate_job(hard, slow, 100, wall=1e7, seed=1).goodput
    )


def test_each_part_of_headrace_changes_what_it_should() -> None:
    full, dedup, sidecar, none = (costs(Cluster(4096), Job(), features) for features in VARIANTS)
    assert none.amplification > sidecar.amplification > 1
    assert dedup.durable < sidecar.durable
    assert full.durable < dedup.durable
    assert none.data_stall >= sidecar.data_stall
    assert full.restore < dedup.restore


def test_a_store_with_few_requests_a_second_is_the_bound() -> None:
    few = costs(Cluster(4096, store_requests=1000), Job(), VARIANTS[2])
    assert few.data_stall > 0.9
    assert few.restore > costs(Cluster(4096), Job(), VARIANTS[2]).restore


def test_the_command_gives_every_answer_for_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.simulate(["--gpus", "8,512", "--rounds", "2", "--json", "--set", "store_read=1e11"]) == 0
    (part,) = decode(capsys.readouterr().out.encode(), "stdout").parts
    assert part.settings["store_read"] == 1e11
    for features in VARIANTS:
        metrics = part.candidates[features.name].metrics
        assert set(metrics) == set(part.metrics)
        assert len(metrics["goodput_512"]) == 2
        assert 50 < metrics["goodput_512"][0] <= 100
    with pytest.raises(UsageError, match="no setting 'speed'"):
        simulate.simulate(["--set", "speed=1"])


def test_help_needs_no_torch() -> None:
    code = "import sys; import headrace.bench.workloads.simulate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert json.loads(done.stdout.lower()) is False
