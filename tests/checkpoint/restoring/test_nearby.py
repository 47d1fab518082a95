import os
from pathlib import Path

import pytest

from checkpoint.restoring import nearby
from dataio.store.open import open_store


@pytest.mark.parametrize(
    ("cores", "ranks", "wanted"),
    [(2, 1, 4), (2, 2, 2), (2, 8, 2), (6, 1, 6), (6, 3, 2), (96, 1, 8), (96, 4, 8), (96, 32, 3)],
)
def test_ranks_of_a_node_have_some_threads_together_that_wait_for_its_disk(
    cores: int, ranks: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(nearby, "file_system", lambda _: "ext4")
    with open_store(str(tmp_path)) as store:
        assert nearby.threads(store, ranks) == wanted


@pytest.mark.parametrize(("cores", "ranks", "wanted"), [(2, 1, 4), (2, 8, 4), (6, 1, 6), (96, 1, 8), (96, 32, 4)])
def test_threads_that_wait_for_another_machine_are_some_for_every_rank(
    cores: int, ranks: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(nearby, "file_system", lambda _: "nfs4")
    with open_store(str(tmp_path)) as store:
        assert nearby.threads(store, ranks) == wanted
