"""Bytes counted at the server's side: real ranks, a real daemon, raw reads over an S3 protocol."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.core.processes import Server, daemon, server
from headrace.bench.workloads.sidecar_rank import RankJob, Shape, run_ranks, write_shards

pytestmark = pytest.mark.slow

SHAPE = Shape(shards=4, per_shard=64, members=(90_000, 20_000, 600))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mr-") as made:
        write_shards(Path(made) / "store" / "bucket" / "ds", SHAPE)
        yield Path(made)


@pytest.fixture(scope="module")
def counting(folder: Path) -> Iterator[Server]:
    with server(folder / "store") as running:
        yield running


def epoch(counting: Server, socket: Path | None, ranks: int, number: int = 0) -> float:
    """Bytes that the server sent for one epoch, per byte of the dataset."""
    before = counting.sent()
    where = str(socket) if socket else None
    jobs = [
        RankJob("s3://bucket/ds", where, SHAPE, rank=rank, ranks=ranks, batch=8, first_epoch=number)
        for rank in range(ranks)
    ]
    _, found = run_ranks(jobs, counting.environ)
    assert sum(figures["samples"] for figures in found) == SHAPE.samples
    return (counting.sent() - before) / SHAPE.total_bytes


@pytest.mark.parametrize("ranks", [1, 4, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (2, 8))])
def test_the_ranks_of_a_node_cost_the_store_one_read_of_each_byte(folder: Path, counting: Server, ranks: int) -> None:
    with daemon(folder / f"fits{ranks}", counting.environ, cache_bytes="64MiB") as running:
        assert epoch(counting, running.socket, ranks) <= 1.02
        assert epoch(counting, running.socket, ranks, 1) == 0


def test_a_cache_of_half_the_dataset_reads_the_other_half_again_and_no_more(folder: Path, counting: Server) -> None:
    budget = SHAPE.total_bytes // 2
    with daemon(folder / "half", counting.environ, cache_bytes=str(budget)) as running:
        assert epoch(counting, running.socket, 2) <= 1.03  # on a busy machine, a late block may be asked for twice
        with running.connect() as connection:
            cache = connection.status()["cache"]
        assert isinstance(cache, dict)
        kept = cache["pinned_bytes"] / SHAPE.total_bytes
        assert 1 - epoch(counting, running.socket, 2, 1) == pytest.approx(kept, abs=0.02)
