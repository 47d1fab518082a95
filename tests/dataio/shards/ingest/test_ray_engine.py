"""The plan packed by two workers of a real Ray cluster on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.dataio import Dataset, pack
from headrace.dataio.core.errors import UsageError
from tests.support.written_media import MakeWav

pytest.importorskip("ray", reason="ray is not installed (pip install 'headrace[ray]')")


def test_two_ray_workers_make_the_dataset_that_one_process_makes(make_wav: MakeWav, tmp_path: Path) -> None:
    for i in range(12):
        make_wav(tmp_path / "in" / f"{i:02}.wav", seconds=0.05 * (i + 1))
    (tmp_path / "in" / "bad.wav").write_bytes(b"no")
    # in a process of its own: Ray leaves threads and sockets behind
    program = """
        import sys
        from headrace.dataio import pack
        with pack(sys.argv[1], sys.argv[2], shard_bytes=8192, engine="ray", workers=2) as dataset:
            report = dataset.report
            assert [w.groups for w in report.workers] and sum(w.groups for w in report.workers) == 13, report
            assert len(report.workers) == 2, report
            assert all(w.bytes > 0 and w.seconds > 0 for w in report.workers), report
            assert len(report.skipped) == 1
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "in"), str(tmp_path / "ray")],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with pack(tmp_path / "in", tmp_path / "local", shard_bytes=8192) as local, Dataset(tmp_path / "ray") as by_ray:
        assert by_ray.document.shards == local.document.shards
        assert by_ray.document.index == local.document.index
        assert len(local.document.shards) > 4
        assert not list(by_ray.store.list("packing/"))


@pytest.mark.parametrize("workers", [0, -1, 1 << 20])
def test_a_wrong_number_of_workers_is_an_error(tmp_path: Path, workers: int) -> None:
    with pytest.raises(UsageError, match=f"workers={workers}"):
        pack(tmp_path, tmp_path / "ds", engine="ray", workers=workers)


def test_an_engine_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no engine 'slurm'"):
        pack(tmp_path, tmp_path / "ds", engine="slurm")
