"""Short clips of a long video in place: what a store sends, counted by the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.core.processes import daemon, server
from headrace.bench.workloads import ranges

pytestmark = pytest.mark.process

SIZE = 30_000_000


@pytest.mark.parametrize(
    ("codec", "container", "most"),
    [("h264", "mp4", 1.1), ("hevc", "mp4", 1.1), ("h264", "mkv", 1.15)],  # of the last, libav looks at 0.4 MB first
)
def test_six_short_clips_cost_a_tenth_more_than_their_groups_of_pictures(
    codec: str, container: str, most: float, tmp_path: Path
) -> None:
    ranges.make(tmp_path / "bucket", codec, container, SIZE)
    with server(tmp_path) as store:
        found = ranges.measure("s3://bucket/set", 6, store.port)
    assert found["media_ratio"] <= most
    assert found["requests"] <= 3
    assert found["again"] == 0, "a second epoch of the same clips comes from the cache"


def test_clips_that_cover_a_file_fetch_it_once(tmp_path: Path) -> None:
    ranges.make(tmp_path / "bucket", "h264", "mp4", SIZE)
    with server(tmp_path) as store:
        found = ranges.measure("s3://bucket/set", 26, store.port)
    assert found["ratio"] <= 1.05
    assert found["requests"] <= 2
    assert found["again"] == 0


def test_the_daemon_of_a_node_fetches_no_more(tmp_path: Path) -> None:
    ranges.make(tmp_path / "bucket", "h264", "mp4", SIZE)
    with server(tmp_path) as store, daemon(tmp_path, store.environ) as sidecar:
        found = ranges.measure("s3://bucket/set", 6, store.port, str(sidecar.socket))
    assert found["media_ratio"] <= 1.1
    assert found["again"] == 0
