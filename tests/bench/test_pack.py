"""`headrace bench pack`: the same members from every candidate, and a peer that cannot run is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from headrace.bench.workloads import pack

COMMAND = [sys.executable, "-m", "headrace.dataio.cli", "bench", "pack"]


def test_packers_are_measured_beside_their_peers(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--rounds", "1", "--files", "4", "--json", "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["parts"][0]["candidates"]
    assert set(found) == set(pack.candidates())
    for name, samples in found.items():
        assert "errors" not in samples, name
        assert samples["metrics"]["files_per_core_s"][0] > 0, name
        assert samples["metrics"]["mb_per_s"][0] > 0, name
    assert not list(tmp_path.iterdir()), "the benchmark left something behind"


def test_without_ffprobe_its_candidate_is_left_out_and_the_output_says_so(tmp_path: Path) -> None:
    nothing = tmp_path / "path"
    nothing.mkdir()
    done = subprocess.run(
        [*COMMAND, "--rounds", "1", "--files", "2", "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PATH": str(nothing)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tar + ffprobe is left out" in done.stdout
    assert "| tar + ffprobe |" not in done.stdout
    assert "| ShardWriter + PyAV |" in done.stdout


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
