"""A trainer that goes on writing to its staged arena while that is stored."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.format import chunking
from headrace.checkpoint.repository import check
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.progress import ProgressFile, RecordingStore
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Made, Wrapped, begin, latest, load, make, save, tiny_state

STATE = {f"t{n}": np.random.default_rng(n).integers(0, 8, MIB, np.uint8).tobytes() for n in range(6)}


class Tampering(Wrapped):
    """The trainer changes one byte of the arena as the store is given chunk number `chunk` of a pack (6 is its footer), or, with
    -1, when it has been given everything."""

    def __init__(self, inner: Store, chunk: int, at: int) -> None:
        super().__init__(inner)
        self._chunk, self._at = chunk, at
        self.made: Made | None = None
        self.fired = 0

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self.inner.put_multipart(key, self._changed(parts))

    def _changed(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        number = 0
        for part in parts:
            if len(part) < chunking.ALIGN and bytes(part).count(0) == len(part):
                yield part  # what is between two chunks
                continue
            if number == self._chunk:
                self._change()
            number += 1
            yield part
        assert number == len(STATE) + 1
        if self._chunk < 0:
            self._change()

    def _change(self) -> None:
        assert self.made is not None
        self.made.arena[self._at] ^= 1
        self.fired += 1


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize(
    ("chunk", "at"),
    [(0, 0), (3, 2 * MIB + 5), (6, 5 * MIB + 7), (-1, 6 * MIB - 1)],
    ids=["hashed", "sent", "before the footer", "when all parts were given"],
)
def test_an_arena_that_is_changed_while_it_is_stored_commits_nothing(
    tmp_path: Path, compression: str, chunk: int, at: int
) -> None:
    with open_store(tmp_path) as inner:
        number = begin(inner)
        first = save(inner, make(inner, tiny_state(1), step=1, number=number))
        store = Tampering(inner, chunk, at)
        store.made = make(inner, STATE, step=2, number=number, compression=compression)
        with pytest.raises(CorruptionError, match="step 2 is not saved: its staged copy was changed"):
            save(store, store.made)
        assert store.fired == 1
        assert latest(inner) == first
        assert not check.check(inner).problems
        again = make(inner, STATE, step=2, number=number, compression=compression)
        assert load(inner, save(inner, again)) == STATE


def test_a_pack_of_changed_bytes_is_not_what_a_worker_that_takes_over_rests_on(tmp_path: Path) -> None:
    fd = os.memfd_create("progress")
    try:
        with open_store(tmp_path) as inner:
            number = begin(inner)
            store = Tampering(inner, -1, 0)
            made = store.made = make(inner, STATE, step=1, number=number)
            book = ProgressFile(fd)
            with pytest.raises(CorruptionError):
                commit_staged(made.arena, made.plan, lambda _: None, store=RecordingStore(store, book), progress=book)
            assert [info.key for info in inner.list("packs/")], "the pack was stored whole"
            assert ProgressFile(fd).stored(inner, made.plan) == {}
            commit_staged(made.arena, made.plan, lambda _: None, store=inner, progress=ProgressFile(fd))
            found = latest(inner)
            assert found is not None
            assert load(inner, found)["t0"] == bytes([STATE["t0"][0] ^ 1]) + STATE["t0"][1:]
    finally:
        os.close(fd)
