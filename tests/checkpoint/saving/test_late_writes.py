"""Two workers of one plan, on a store that applies a request of the first one after the second has committed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint.format import chunking, pack
from headrace.checkpoint.repository import check
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.progress import ProgressFile, RecordingStore
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.limits import KIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.faulty_stores import Late
from tests.support.checkpoint_states import Made, begin, latest, load, make

STATE = {f"t{n}": os.urandom(200 * KIB) for n in range(4)}


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Late]:
    with open_store(tmp_path / "store") as store:
        yield Late(store)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "progress", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def carried(store: Store, made: Made, fd: int) -> None:
    book = ProgressFile(fd)
    commit_staged(made.arena, made.plan, lambda _: None, store=RecordingStore(store, book), progress=book)


def whole(store: Store) -> None:
    """The step is there, to the bit, and nothing is damaged."""
    found = latest(store)
    assert found is not None
    assert load(store, found) == STATE
    assert check.check(store).clean


@pytest.mark.parametrize("held", ["packs/", ".manifest", "/fate", "/COMMIT", "leases/"])
def test_the_last_request_of_a_dead_worker_harms_nothing_that_its_successor_stored(
    late: Late, fd: int, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor cuts packs in other places, as one does that compresses otherwise."""
    made = make(late, STATE, step=1, number=begin(late))
    late.hold(held)
    with monkeypatch.context() as small, pytest.raises(TransientError, match="applied later"):
        small.setattr(pack, "PACK_BYTES", chunking.CHUNK_BYTES + chunking.ALIGN + 100 * KIB)
        carried(late, made, fd)
    assert not late.holding
    request = late.writes[-1]
    assert held in request.key
    carried(late, made, fd)
    whole(late)
    late.land(request)
    whole(late)


def test_no_request_of_two_workers_harms_the_step_when_it_is_applied_once_more(
    late: Late, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself, and all of them from the last to the first."""
    made = make(late, STATE, step=1, number=begin(late))
    monkeypatch.setattr(pack, "PACK_BYTES", chunking.CHUNK_BYTES + chunking.ALIGN + 100 * KIB)
    late.hold(".pack")
    with pytest.raises(TransientError):
        carried(late, made, fd)
    monkeypatch.undo()
    carried(late, made, fd)
    requests = [*late.writes]
    assert {"packs", "runs", "leases", "repo.json"} <= {request.key.split("/")[0] for request in requests}
    for request in requests:
        late.land(request)
        whole(late)
    for request in reversed(requests):
        late.land(request)
    whole(late)
