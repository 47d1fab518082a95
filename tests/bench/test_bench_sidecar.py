"""The parts of `headrace bench sidecar`, small."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from headrace.bench.core.processes import daemon
from headrace.bench.core.report import part_table
from headrace.bench.core.results import Part, Samples
from headrace.bench.workloads.sidecar import FIGURES, deliver, mapped_ratio, open_p50, single_pass
from headrace.bench.workloads.sidecar_rank import RankJob, Shape, run, write_shards

pytestmark = pytest.mark.slow

SMALL = Shape(shards=2, per_shard=8, members=(30_000, 5_000, 60))


def test_a_rank_reads_each_sample_of_an_epoch_once_with_and_without_the_daemon(tmp_path: Path) -> None:
    write_shards(tmp_path, SMALL)
    figures = [run(RankJob(f"file://{tmp_path}", None, SMALL, rank=rank, ranks=2, batch=4)) for rank in range(2)]
    assert sum(figure["samples"] for figure in figures) == SMALL.samples
    assert sum(figure["bytes"] for figure in figures) == SMALL.samples * sum(SMALL.members)


def test_the_figures_are_measured_on_a_real_daemon(tmp_path: Path) -> None:
    write_shards(tmp_path, SMALL)
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    assert all(seconds > 0 for seconds in single_pass(tmp_path, tmp_path, SMALL))
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        deliver(Path(folder) / "a", f"file://{tmp_path}", SMALL, 1, found)
        with daemon(Path(folder) / "b", cache_bytes="64MiB") as running:
            assert mapped_ratio(running, f"file://{tmp_path}", SMALL) > 0
            key, ranges = SMALL.read(0)
            with running.connect() as sidecar:
                assert open_p50(sidecar, f"file://{tmp_path}", key, ranges[0]) > 0
    assert all(len(found[name]) == 1 for name in ("first_1", "later_1", "cpu_1", "batch_1"))


def test_the_table_says_which_goals_are_met() -> None:
    found = {"headrace": Samples({name: [50.0, 59.0, 70.0] for name in FIGURES})}
    text = part_table(Part("sidecar", metrics=FIGURES, candidates=found))
    assert "| Open of a cached block, p50, µs | ≤ 60 | 59 (50–70) ✓ |" in text
    assert "| samples/s, 1 rank, first epoch | ≥ 4000 | 59 (50–70) ✗ |" in text
