"""`headrace bench pack`: the same members from every candidate."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from headrace.bench.workloads import pack
from tests.support.benchmarks import run_part


def test_packers_are_measured_beside_their_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_part(capsys, "pack", "--rounds", "1", "--files", "4", "--directory", str(tmp_path)).candidates
    assert set(found) == set(pack.CANDIDATES)
    for name, samples in found.items():
        assert samples.metrics["files_per_core_s"][0] > 0, name
        assert samples.metrics["mb_per_s"][0] > 0, name
    assert not list(tmp_path.iterdir()), "the benchmark left something behind"


def test_a_shard_with_other_contents_is_no_result(tmp_path: Path) -> None:
    files = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    for path in files:
        path.write_bytes(path.name.encode())
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "0.tar", "w") as tar:
        for path in files:
            tar.add(path, path.name)
    pack.check_members(files, packed)
    files[1].write_bytes(b"c.mp4")
    with pytest.raises(AssertionError, match="2 members, 2 files, 1 of them equal"):
        pack.check_members(files, packed)
