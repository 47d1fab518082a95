"""`headrace bench store`: every client moves the same objects, bounds hold, and the store is as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.core.measure import Latencies, edge
from headrace.bench.peers.object_stores import FILE_CLIENTS, S3_CLIENTS
from headrace.bench.workloads.store import ClientJob, Sweep, fresh_prefix
from headrace.bench.workloads.store import store as main
from headrace.bench.workloads.store_worker import measure
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store
from tests.support.benchmarks import run_part

QUICK = ["--rounds", "1", "--seconds", "0.05"]


@pytest.mark.s3
def test_a_bucket_is_measured_beside_the_raw_clients_and_left_as_it_was(
    s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("boto3", reason="the extra bench is not installed")
    sweep = Sweep(("get", "range", "small", "put", "multipart", "list"), (65536, 8 * MIB), (2,))
    with open_store(s3_url) as store:
        store.put("theirs", b"not ours")
        store.put("headrace-bench-other/run", b"not ours")
    options = ["--sizes", "64KiB,8MiB", "--bytes", "128KiB", "--threads", "2", *QUICK]
    found = run_part(capsys, "store", s3_url, *options).candidates
    assert tuple(found) == S3_CLIENTS
    for name, samples in found.items():
        assert set(samples.metrics) == set(sweep.metrics()), name
        assert all(value[0] > 0 for metric, value in samples.metrics.items() if not metric.endswith("_cpu")), name
    with open_store(s3_url) as store:
        assert [info.key for info in store.list()] == ["headrace-bench-other/run", "theirs"]


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path = tmp_path / "a #%41?b"
    tmp_path.mkdir()
    (tmp_path / "theirs").write_bytes(b"not ours")
    options = ["--sizes", "4KiB,2MiB", "--operations", "get,put,list", "--threads", "1,2", *QUICK]
    found = run_part(capsys, "store", str(tmp_path), *options).candidates
    assert tuple(found) == FILE_CLIENTS
    for name, samples in found.items():
        rates, median = samples.metrics["get_2097152_x1"], samples.metrics["get_2097152_x1_p50"]
        assert rates[0] * median[0] / 1e3 < 2 * 2 * MIB / 1e6, f"{name}: one at a time, yet more than latency allows"
        assert sum(count for _, count in samples.histograms["get_2097152_x1"]) >= 2
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_objects_that_another_program_puts_below_the_prefix_are_left_alone(tmp_path: Path) -> None:
    sweep = Sweep(("get", "put"), (1000,), (1,))
    with fresh_prefix(str(tmp_path), sweep, lambda *_: None) as place, open_store(place) as store:
        ours = [info.key for info in store.list()]
        store.put("put/1000/999", b"theirs, though it looks like ours")
        store.put("read/foreign", b"theirs")
    with open_store(place) as store:
        assert [info.key for info in store.list()] == ["put/1000/999", "read/foreign"]
    assert len(ours) == 8, "nothing had been prepared"


def test_what_the_bounds_leave_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--clients", "os", "--threads", "1,2", *QUICK]
    part = run_part(capsys, "store", str(tmp_path), "--sizes", "4KiB", "--duration", "0", *options)
    assert part.candidates["os"].metrics["skipped_cells"] == [8.0], "4 operations at 2 widths"
    assert any("--duration or --max-bytes was reached" in note for note in part.notes)
    part = run_part(capsys, "store", str(tmp_path), "--sizes", "1MiB", "--max-bytes", "4MiB", *options)
    moved = sum(
        size * count
        for name, pairs in part.candidates["os"].histograms.items()
        for size in [float(name.split("_")[1])]
        for _, count in pairs
    )
    assert moved <= 6 * MIB, "the last cell may end its two requests a thread, no more"
    assert part.candidates["os"].metrics["skipped_cells"][0] > 0


def test_cells_that_would_not_fit_in_memory_are_named() -> None:
    sweep = Sweep(("get",), (256 * MIB,), (1, 16))
    assert [cell.width for cell in sweep.cells()] == [1]
    assert [cell.title for cell in sweep.left_out()] == ["256 MiB ×16"]


def test_requests_that_fail_are_counted_and_named(tmp_path: Path) -> None:
    order = ClientJob(
        client="os",
        url=f"file://{tmp_path}",
        operations=("get",),
        sizes=(10,),
        widths=(1,),
        seconds=0.01,
        cell_bytes=100,
        all_seconds=10,
        all_bytes=10**6,
    )
    found = measure(order)
    assert "get_10_x1" not in found, "a rate of nothing"
    assert "requests failed: get_10_x1: FileNotFoundError" in json.dumps(found["errors"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gs://bucket"], "neither a bucket nor a directory"),
        (["--operations", "get,guess", "/tmp"], "no operation 'guess'"),
        (["--clients", "guess", "/tmp"], "no client 'guess'"),
        (["--threads", "many", "/tmp"], "not a list of numbers"),
        (["--threads", "0", "/tmp"], "positive"),
    ],
)
def test_wrong_use_is_said_before_anything_is_written(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        main(arguments)


@given(st.lists(st.floats(2e-6, 3000), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_never_too_low_and_at_most_a_64th_too_high(values: list[float], share: float) -> None:
    halves = Latencies(), Latencies()
    for number, value in enumerate(values):
        halves[number % 2].add(value)
    found = Latencies().merge(halves)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    assert found.total == len(values)
    assert exact <= found.percentile(share) * (1 + 1e-9)
    assert found.percentile(share) <= exact * (1 + 1 / 64) * (1 + 1e-9)
    assert len(found.counts) <= 32 * 64


def test_the_fastest_and_slowest_latencies_go_into_the_outer_buckets() -> None:
    assert edge(0) == edge(1e-6)
    assert edge(1e9) == edge(2.0**32 * 1e-6)
