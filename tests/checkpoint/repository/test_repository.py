"""Timelines and visible steps; figures of deduplication; restoring with damage; `check` and the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Base, Lease, PendingDelete, StepName, StepOfRun, Timeline, encode, read
from headrace.checkpoint.format.manifest import Chunk
from headrace.checkpoint.repository import check, fetch, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.restoring import chunk_reader
from headrace.dataio.cli import main as headrace
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError, NotFoundError
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, Wrapped, begin, flip, latest, load, make, manifest_of, save, tiny_state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "repo"


def visible(store: Store) -> list[tuple[int, int]]:
    return [(base.step, base.timeline) for base in repository.visible(store, RUN)]


def put_steps(store: Store, number: int, steps: Sequence[int]) -> list[Base]:
    return [save(store, make(store, tiny_state(s), step=s, number=number)) for s in steps]


def test_latest_follows_the_newest_timeline_and_then_its_parents(store: Store) -> None:
    one = put_steps(store, begin(store), [100, 200, 300])
    assert visible(store) == [(300, 1), (200, 1), (100, 1)]
    second = begin(store, one[1])
    assert visible(store) == [(300, 1), (200, 1), (100, 1)]  # opened, not saved yet: it hides nothing
    put_steps(store, second, [250, 300])
    assert visible(store) == [(300, 2), (250, 2), (200, 1), (100, 1)]
    third = begin(store, one[0])
    put_steps(store, third, [200])
    assert visible(store) == [(200, 3), (100, 1)]
    assert repository.find(store, RUN, 100) == one[0]
    with pytest.raises(NotFoundError, match="no step 250; it is in the abandoned timeline 2"):
        repository.find(store, RUN, 250)


def test_a_trainer_that_starts_over_starts_a_history_of_its_own(store: Store) -> None:
    put_steps(store, begin(store), [1])
    second = begin(store)
    assert visible(store) == [(1, 1)]
    put_steps(store, second, [1])
    assert visible(store) == [(1, 2)]


def test_going_back_and_saving_the_same_step_again_never_collides(store: Store) -> None:
    one = put_steps(store, begin(store), [1, 2])
    again = save(store, make(store, tiny_state(99), step=2, number=begin(store, one[0])))
    assert latest(store) == again
    assert load(store, again) == tiny_state(99)
    assert load(store, one[1]) == tiny_state(2)


def test_a_timeline_whose_parent_is_not_older_is_refused(store: Store) -> None:
    number = begin(store)
    found = read(store, names.timeline(RUN, number), Timeline)
    store.put(names.timeline(RUN, number), encode(msgspec.structs.replace(found, parent=StepName(1, 1))))
    with pytest.raises(CorruptionError, match="not older"):
        timeline.branch(store, RUN)


def test_timelines_opened_at_once_get_numbers_of_their_own(store: Store) -> None:
    assert [timeline.open_timeline(store, RUN, StepName(0, 0)) for _ in range(3)] == [1, 2, 3]
    assert timeline.newest_after(store, RUN, 3) is None


def test_an_unchanged_state_writes_no_payload_at_all(store: Store) -> None:
    number = begin(store)
    first = save(store, make(store, tiny_state(1), step=1, number=number))
    second = save(store, make(store, tiny_state(1), step=2, number=number, bases=(first,)))
    third = save(store, make(store, tiny_state(1), step=3, number=number, bases=(second,)))
    assert load(store, third) == tiny_state(1)
    for base in (second, third):
        manifest = manifest_of(store, base)
        assert manifest.bytes_written == 0
        assert manifest.bytes_deduplicated == manifest.bytes_state == sum(map(len, tiny_state(1).values()))
    assert len({info.key for info in store.list(names.PACKS)}) == 1


def test_gaps_between_small_tensors_count_neither_as_written_nor_as_deduplicated(store: Store) -> None:
    state = {f"w{size}": bytes([size % 251]) * size for size in (1, 17, 3000, 5, 40_000, 65_535, 100_001)}
    number, total = begin(store), sum(map(len, state.values()))
    first = save(store, make(store, state, step=1, number=number))
    second = save(store, make(store, state, step=2, number=number, bases=(first,)))
    manifests = [manifest_of(store, base) for base in (first, second)]
    assert [(each.bytes_written, each.bytes_deduplicated) for each in manifests] == [(total, 0), (0, total)]
    assert sum(chunk.raw for chunk in manifests[0].chunks) > total, "there are gaps"
    assert load(store, second) == state


def test_only_what_changed_is_written(store: Store) -> None:
    number = begin(store)
    first = save(store, make(store, tiny_state(1), step=1, number=number))
    second = save(store, make(store, tiny_state(2), step=2, number=number, bases=(first,)))
    manifest = manifest_of(store, second)
    assert manifest.bytes_deduplicated == 160 * KIB
    assert 200 * KIB < manifest.bytes_written < 201 * KIB
    assert load(store, second) == tiny_state(2)


def test_equal_tensors_of_one_save_are_stored_once(store: Store) -> None:
    same = tiny_state(1)["weights"]
    base = save(store, make(store, {"a": same, "b": same}, step=1, number=begin(store)))
    assert manifest_of(store, base).bytes_written == len(same)
    assert load(store, base) == {"a": same, "b": same}


def test_a_damaged_base_costs_space_but_not_the_save(root: Path) -> None:
    with open_store(root) as store:
        number = begin(store)
        first = save(store, make(store, tiny_state(1), step=1, number=number))
        flip(root / names.manifest(RUN, number, 1, first.attempt, 0), 50)
        second = save(store, make(store, tiny_state(1), step=2, number=number, bases=(first,)))
        assert manifest_of(store, second).bytes_deduplicated == 0
        assert load(store, second) == tiny_state(1)


def test_compressed_chunks_come_back_and_incompressible_ones_stay_raw(store: Store) -> None:
    state = {"zeros": bytes(3 * MIB), "noise": tiny_state(1)["weights"]}
    base = save(store, make(store, state, step=1, number=begin(store), compression="zstd"))
    manifest = manifest_of(store, base)
    assert sorted(chunk.codec for chunk in manifest.chunks) == [0, 1]
    assert manifest.bytes_written < 250 * KIB
    assert load(store, base) == state


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4 * MIB)), min_size=1, max_size=30, unique_by=lambda c: c[0])
)
def test_reads_are_coalesced_and_bounded(places: list[tuple[int, int]]) -> None:
    chunks = [Chunk(digest(bytes([i])), 0, slot * 4 * MIB, size, size) for i, (slot, size) in enumerate(places)]
    found = list(fetch.batches("p", chunks))
    assert [c.offset for batch in found for c in batch.chunks] == sorted(c.offset for c in chunks)
    for batch in found:
        assert sum(length for _, length in batch.ranges) <= fetch.BATCH_BYTES
        for chunk in batch.chunks:
            assert any(at <= chunk.offset and chunk.offset + chunk.stored <= at + n for at, n in batch.ranges)


def test_neighbouring_chunks_are_one_read() -> None:
    chunks = [Chunk(digest(bytes([i])), 0, i * 12288, 10000, 10000) for i in range(100)]
    (batch,) = fetch.batches("p", chunks)
    assert batch.ranges == ((0, 99 * 12288 + 10000),)


class Flaky(Wrapped):
    """The first `bad` reads of packs bring a flipped bit."""

    def __init__(self, inner: Store, bad: int) -> None:
        super().__init__(inner)
        self.bad = bad

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.inner.get_ranges_into(key, ranges)
        if self.bad:
            self.bad -= 1
            ranges[0][1][7] ^= 1


def test_a_chunk_that_arrives_damaged_is_fetched_once_more(store: Store) -> None:
    base = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    flaky = Flaky(store, bad=1)
    assert load(flaky, base) == tiny_state(1)
    assert flaky.bad == 0
    with pytest.raises(
        CorruptionError, match=f"step 1 of run exp is damaged: tensor .* at offset 0 of packs/{base.attempt}/0-"
    ):
        load(Flaky(store, bad=2), base)


@pytest.fixture
def damaged(root: Path) -> tuple[Path, Base, Path]:
    """A repository of two steps that share a chunk; the pack of the first."""
    with open_store(root) as store:
        number = begin(store)
        first = save(store, make(store, tiny_state(1), step=1, number=number))
        save(store, make(store, tiny_state(2), step=2, number=number, bases=(first,)))
    return root, first, next(root.glob(f"packs/{first.attempt}/*"))


def frozen_offset(root: Path, base: Base) -> int:
    with open_store(root) as store:
        manifest = manifest_of(store, base)
        tensor = next(t for t in manifest.tensors if t.name == "frozen")
        return manifest.chunks[tensor.spans[0].chunk].offset


def problems(root: Path, *, data: bool = True) -> list[tuple[str, str, tuple[str, ...]]]:
    with open_store(root) as store:
        return [(p.object, p.what, p.hits) for p in check.check(store, data=data).problems]


def test_a_flipped_payload_bit_is_traced_to_every_step_and_tensor_it_hits(damaged: tuple[Path, Base, Path]) -> None:
    root, first, pack = damaged
    at = frozen_offset(root, first)
    flip(pack, at + 5)
    with (
        open_store(root) as store,
        pytest.raises(CorruptionError, match=rf"tensor 'frozen', \d+ bytes at offset {at} of packs"),
    ):
        load(store, first)
    ((where, what, hits),) = problems(root)
    assert where == str(pack.relative_to(root))
    assert f"at offset {at} differ from the bytes that were written" in what
    assert hits == ("exp/1/1: frozen", "exp/1/2: frozen")
    assert problems(root, data=False) == []


def test_a_missing_a_cut_and_a_table_damaged_pack_are_told_apart(damaged: tuple[Path, Base, Path]) -> None:
    root, first, pack = damaged
    good = pack.read_bytes()
    pack.chmod(0o644)
    pack.write_bytes(good[: len(good) // 2])
    assert "does not end in a trailer" in problems(root)[0][1]
    with open_store(root) as store, pytest.raises(CorruptionError, match="is damaged: tensor"):
        load(store, first)
    pack.write_bytes(good)
    flip(pack, -100)
    assert [what for _, what, _ in problems(root)] == [
        f"{pack.relative_to(root)} is damaged: the footer does not match its digest"
    ]
    with open_store(root) as store:
        assert load(store, first) == tiny_state(1)  # restoring needs manifests only
    pack.unlink()
    ((_, what, hits),) = problems(root)
    assert what == "it is missing"
    assert {hit.split(":")[0] for hit in hits} == {"exp/1/1", "exp/1/2"}
    with open_store(root) as store, pytest.raises(CorruptionError, match="is damaged: tensor"):
        load(store, first)


@pytest.mark.parametrize("what", ["manifest", "fate", "commit"])
def test_damage_of_small_objects_is_reported_and_the_other_step_stays(
    damaged: tuple[Path, Base, Path], what: str
) -> None:
    root, first, _ = damaged
    key = {
        "manifest": names.manifest(RUN, 1, 1, first.attempt, 0),
        "fate": names.decision(RUN, 1, 1, first.attempt),
        "commit": names.commit(RUN, 1, 1),
    }[what]
    flip(root / key, 3)
    found = problems(root)
    assert any(key in text for _, text, _ in found)
    with open_store(root) as store:
        base = latest(store)
        assert base is not None
        assert base.step == 2
        assert load(store, base) == tiny_state(2)


def test_the_command_lists_and_checks(damaged: tuple[Path, Base, Path], capsys: pytest.CaptureFixture[str]) -> None:
    root, _, pack = damaged
    assert ckpt(["ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "step        1" in lines[0]
    assert "360 KiB of state" in lines[0]
    assert ckpt(["check", str(root), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["clean"]
    assert [line["step"] for line in report["steps"]] == [1, 2]
    pack.unlink()
    assert ckpt(["check", str(root), "--run", RUN]) == 4
    out = capsys.readouterr().out
    assert f"damaged: packs/{pack.parent.name}/{pack.name}: it is missing\n  needed by exp/1/1: frozen" in out
    assert ckpt(["check", str(root), "--quick"]) == 4


def test_the_command_says_when_there_is_nothing(
    root: Path, damaged: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(["ckpt", "ls", str(tmp_path / "nowhere")]) == 2
    assert "no checkpoint repository at" in capsys.readouterr().err
    assert headrace(["ckpt", "ls", str(root), "--run", "other"]) == 2
    assert "no run 'other'" in capsys.readouterr().err


class ReadOnly(Wrapped):
    """A store that this reader may not write to."""

    def put(self, key: str, data: Buffer) -> None:
        raise AccessDeniedError("read only")

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        raise AccessDeniedError("read only")


def test_a_reader_that_may_not_write_still_restores_what_is_committed(store: Store) -> None:
    number = begin(store)
    first = save(store, make(store, tiny_state(1), step=1, number=number))
    save(store, make(store, tiny_state(2), step=2, number=number))
    store.delete_many([names.commit(RUN, number, 2)])
    assert latest(ReadOnly(store)) == first  # it cannot finish the other one
    assert load(ReadOnly(store), first) == tiny_state(1)


def test_a_lease_names_the_step_while_it_is_read(store: Store) -> None:
    base = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    with chunk_reader.LeasedStep(store, RUN, base):
        (info,) = store.list(names.LEASES)
        assert read(store, info.key, Lease).bases == (base,)
    assert not list(store.list(names.LEASES))


def test_a_step_that_a_collector_is_removing_is_not_restored(store: Store) -> None:
    base = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    store.put("gc/1.json", encode(PendingDelete(steps=(StepOfRun(RUN, base.timeline, base.step),))))
    with pytest.raises(NotFoundError, match="step 1 of run exp is being removed"):
        load(store, base)
