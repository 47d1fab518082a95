"""`millrace bench store`: every candidate moves the same objects, and the bucket is as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.store import CANDIDATES, main
from dataio.core.errors import UsageError
from dataio.store.open import open_store

COMMAND = [sys.executable, "-m", "dataio.cli", "bench", "store"]


@pytest.mark.s3
def test_a_bucket_is_measured_beside_the_raw_clients_and_left_as_it_was(s3_url: str) -> None:
    pytest.importorskip("boto3", reason="the extra bench is not installed")
    small = ["--rounds", "1", "--sizes", "64KiB,1MiB", "--threads", "1,2", "--bytes", "128KiB"]
    done = subprocess.run([*COMMAND, s3_url, *small, "--json"], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["store"]
    assert tuple(found) == CANDIDATES
    for name, samples in found.items():
        cells = {
            f"{way}_{size}_{what}"
            for way in ("get", "put")
            for size in (65536, 1 << 20)
            for what in ("x1", "x2", "cpu")
        }
        assert set(samples["metrics"]) == cells | {"peak_mib"}, name
        assert all(value[0] >= 0 for value in samples["metrics"].values()), name
    with open_store(s3_url) as store:
        assert list(store.list()) == []


def test_only_buckets_are_measured() -> None:
    with pytest.raises(UsageError, match="no bucket"):
        main(["/tmp/folder"])
