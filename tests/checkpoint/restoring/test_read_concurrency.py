import os
from pathlib import Path

import pytest

from headrace.checkpoint.restoring import shared_reads
from headrace.dataio.store.open import open_store


@pytest.mark.parametrize(
    ("kind", "cores", "ranks", "wanted"),
    [
        *(("ext4", *one) for one in [(2, 1, 4), (2, 2, 2), (2, 8, 2), (6, 1, 6), (6, 3, 2), (96, 1, 8), (96, 32, 3)]),
        *(("nfs4", *one) for one in [(2, 1, 4), (2, 8, 4), (6, 1, 6), (96, 1, 8), (96, 32, 4)]),
    ],
)
def test_some_threads_wait_for_a_nodes_disk_or_for_each_rank_where_the_store_is_another_machine(
    kind: str, cores: int, ranks: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(shared_reads, "file_system", lambda _: kind)
    with open_store(str(tmp_path)) as store:
        assert shared_reads.threads(store, ranks) == wanted
