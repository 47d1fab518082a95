"""The journal of a run gives back what was recorded, and a plan has a bounded number of units."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.dataio.core.errors import CapacityError, CorruptionError
from headrace.dataio.shards.units import journal as journals
from headrace.dataio.shards.units.journal import Journal, MemoryJournal, Record, StoredJournal, divide
from headrace.dataio.store.open import open_store


class Note(Record, frozen=True):
    text: str


@pytest.mark.parametrize("kind", ["stored", "memory"])
def test_a_journal_gives_back_what_was_recorded(tmp_path: Path, kind: str) -> None:
    with open_store(tmp_path / "store") as store:
        journal: Journal[Note] = MemoryJournal() if kind == "memory" else StoredJournal(store, "runs/p", Note)
        journal.write(4, Note("four"))
        assert journal.done() == {4}
        assert (journal.read(4), journal.read(5)) == (Note("four"), None)
        assert list(journal.records(1, 4)) == [Note("four")]
        with pytest.raises(CorruptionError, match="unit 5 is missing"):
            list(journal.records(2, 4))
        journal.delete()
        assert not journal.done()
        assert not list(store.list())


def test_the_first_start_of_a_run_decides_what_it_builds_on(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        assert StoredJournal(store, "runs/p", Note).begin(3) == 3
        assert StoredJournal(store, "runs/p", Note).begin(7) == 3
        store.put("runs/p/begun", b"?")
        with pytest.raises(CorruptionError, match="delete the folder runs/p"):
            StoredJournal(store, "runs/p", Note).begin(3)


def test_a_damaged_record_is_absent_and_one_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store") as store:
        journal = StoredJournal(store, "p", Note)
        journal.write(0, Note("zero"))
        data = bytearray(store.get("p/00000000.unit"))
        data[-1] ^= 1
        store.put("p/00000000.unit", data)
        assert journal.read(0) is None
        monkeypatch.setattr(journals, "RECORD_BYTES", 64)
        with pytest.raises(CapacityError, match="unit 1 would be larger than 64 B"):
            journal.write(1, Note("x" * 64))


def test_units_hold_adjacent_items_up_to_both_limits() -> None:
    assert list(divide([5, 5, 20, 1], unit_bytes=10, unit_items=8)) == [range(2), range(2, 3), range(3, 4)]
    assert list(divide([0] * 5, unit_bytes=10, unit_items=2)) == [range(2), range(2, 4), range(4, 5)]
    assert list(divide([], unit_bytes=10, unit_items=2)) == []


@pytest.mark.parametrize("sizes", [[1] * 5000, [10**12] * 5000, [1, 10**9] * 2500, [10**9, *[1] * 4999]])
def test_a_plan_has_a_bounded_number_of_units(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    monkeypatch.setattr(journals, "MAX_UNITS", 100)
    runs = list(divide(sizes, unit_bytes=1, unit_items=1))
    assert [number for run in runs for number in run] == list(range(len(sizes)))
    assert len(runs) <= 300


def test_records_are_msgpack_behind_their_digest(tmp_path: Path) -> None:
    import blake3

    with open_store(tmp_path / "store") as store:
        StoredJournal(store, "packing/p", Note).write(0, Note("a"))
        data = store.get("packing/p/00000000.unit")
    assert data[:32] == blake3.blake3(data[32:]).digest()
    assert msgspec.msgpack.decode(data[32:]) == {"text": "a"}
