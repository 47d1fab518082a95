"""`headrace bench lerobot`: its own candidates deliver the samples of the data set that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.core.processes import environment_variables, server
from headrace.bench.peers import lerobot as peers
from headrace.bench.workloads import lerobot

pytestmark = pytest.mark.process


def test_both_cameras_and_the_rows_of_a_frame_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PER_FILE", 2)
    lerobot.make(tmp_path / "bench", 4)
    folder = str(tmp_path / "bench")
    for name in (lerobot.OURS, lerobot.FLOOR):
        assert lerobot.measure(name, folder, 4, 3, 0)["samples_per_s"] > 0
    with server(tmp_path) as store, environment_variables(store.environ):
        assert lerobot.measure(lerobot.OURS, folder, 4, 3, store.port)["first_epoch_s"] > 0
        assert any(path.endswith(".mp4") and gets for path, (gets, _) in store.files().items())


def test_actions_of_another_frame_are_an_error() -> None:
    peers.check_rows(5, [8])
    with pytest.raises(ValueError, match="the actions begin at row 20"):
        peers.check_rows(5, [20])
