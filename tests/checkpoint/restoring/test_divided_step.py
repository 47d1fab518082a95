"""The ranks of a large job divide the manifests of a step, and each still reads exactly what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headrace.checkpoint.format import excerpt
from headrace.checkpoint.format import group as groups
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.chunking import Box, digest, whole
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.restoring import chunk_reader, tensor_homes
from headrace.checkpoint.restoring.chunk_reader import Want
from headrace.checkpoint.restoring.divided_step import manifests_of, readers_of
from headrace.dataio.core.errors import CorruptionError, NotFoundError, TransientError
from tests.support.checkpoint_states import RUN, MemorySink
from tests.support.divided_restores import Job, Restored, Row, part, piece, rows_of

SHAPE = (37, 530)
Saved = list[list[Row]]
Wanted = list[dict[str, list[Box]]]


def split(name: str, dim: int, count: int) -> list[list[Row]]:
    """The rows of each rank when a tensor is cut in one dimension."""
    pieces = [piece(SHAPE, dim, index, count) for index in range(count)]
    return [rows_of(name, box) if box is not None else [] for box in pieces]


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    starts = [draw(st.integers(0, n)) for n in SHAPE]
    sizes = [draw(st.integers(0, n - at)) for n, at in zip(SHAPE, starts, strict=True)]
    return Box(SHAPE, tuple(starts), tuple(sizes))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Saved, Wanted, int]:
    """A state that some ranks save, the boxes that other ranks restore, and the size of a group."""
    saving, restoring = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    saved: Saved = [[(f"own {rank}", None, bytes([rank]) * 5)] for rank in range(saving)]
    wanted: Wanted = [{} for _ in range(restoring)]
    for number in range(draw(st.integers(1, 4))):
        name, kind = f"t{number}", draw(st.sampled_from(("rows", "columns", "whole")))
        if kind == "whole":
            saved[draw(st.integers(0, saving - 1))] += rows_of(name, whole(SHAPE))
        else:
            for rank, rows in enumerate(split(name, int(kind == "columns"), saving)):
                saved[rank] += rows
        want = draw(st.sampled_from(("rows", "columns", "whole", "boxes")))
        for rank in range(restoring):
            if want == "boxes":
                wanted[rank][name] = draw(st.lists(boxes(), min_size=1, max_size=2))
            elif want == "whole":
                wanted[rank][name] = [whole(SHAPE)]
            elif (box := piece(SHAPE, int(want == "columns"), rank, restoring)) is not None:
                wanted[rank][name] = [box]
    return saved, wanted, draw(st.sampled_from((100, 2)))


def by_all_manifests(job: Job, base: Base, wanted: Wanted, rank: int) -> Restored:
    """What a rank restores that reads all manifests."""

    def read() -> Restored:
        step = fetch.open_step(job.store, RUN, base)
        saved = chunk_reader.tensors_of(step, rank)
        sinks = {name: [MemorySink(box.local[0] * box.local[1]) for box in its] for name, its in wanted[rank].items()}
        wants = [
            Want(saved[name], box, sink)
            for name, its in wanted[rank].items()
            for box, sink in zip(its, sinks[name], strict=True)
        ]
        chunk_reader.read(job.store, step, wants)
        contents = {name: [bytes(sink.data) for sink in its] for name, its in sinks.items()}
        return Restored(contents, {}, saved, 0)

    found: Restored = job.run([read])[0]
    return found


@settings(max_examples=40)
@given(jobs())
def test_every_rank_restores_what_it_would_restore_from_all_manifests(drawn: tuple[Saved, Wanted, int]) -> None:
    saved, wanted, group_ranks = drawn
    job = Job(groups=group_ranks)
    base = job.save(saved)
    found = job.restore(base, wanted)
    assert not job.errors, job.errors
    for rank, restored in enumerate(found):
        own = rank if rank < len(saved) else 0
        assert restored.local == {f"own {own}": bytes([own]) * 5}
        assert restored.boxes == {n: [part(n, box).tobytes() for box in its] for n, its in wanted[rank].items()}
        assert restored.boxes == by_all_manifests(job, base, wanted, rank).boxes


@given(st.integers(1, 30), st.integers(1, 30))
def test_each_manifest_has_one_reader_and_each_rank_reads_its_own(saved: int, ranks: int) -> None:
    read = {rank: manifests_of(rank, saved, ranks) for rank in range(ranks)}
    for rank, numbers in read.items():
        assert numbers[0] == (rank if rank < saved else 0)
        assert len(set(numbers)) == len(numbers)
    for number in range(saved):
        readers = [rank for rank in range(ranks) if number in read[rank]]
        assert sorted(readers_of(number, saved, ranks)) == readers
        assert sum(number % ranks == rank for rank in readers) == 1


def by_rows(count: int, tensors: int = 3) -> Saved:
    """Tensors that FSDP has split over these ranks, and one small tensor on each of the first ranks."""
    saved: Saved = [[(f"own {rank}", None, b"mine")] for rank in range(count)]
    for number in range(tensors):
        for rank, rows in enumerate(split(f"t{number}", 0, count)):
            saved[rank] += rows
        saved[number % count] += rows_of(f"step {number}", whole((4, 1)))
    return saved


def wanted_by_rows(count: int, tensors: int = 3) -> Wanted:
    wanted: Wanted = [{} for _ in range(count)]
    for number in range(tensors):
        for rank in range(count):
            if (box := piece(SHAPE, 0, rank, count)) is not None:
                wanted[rank][f"t{number}"] = [box]
            wanted[rank][f"step {number}"] = [whole((4, 1))]
    return wanted


@pytest.mark.parametrize(("restoring", "most"), [(12, 2), (9, 2), (20, 3)])
def test_a_restore_makes_a_few_requests_a_rank(restoring: int, most: int) -> None:
    job = Job(groups=5)
    base = job.save(by_rows(12))
    job.sent.clear()
    found = job.restore(base, wanted_by_rows(restoring))
    assert not job.errors
    assert all(each.boxes["t1"] for each in found if "t1" in each.boxes)
    assert job.count("GET", ".manifest") == 12 + max(restoring - 12, 0)
    assert job.count() <= most * 12
    assert job.count("PUT", "leases/") == job.count("DELETE", "leases/") == 1


def test_with_the_same_layout_a_rank_gets_no_rows_of_other_ranks_but_small_tensors() -> None:
    job = Job()
    base = job.save(by_rows(6))
    found = job.restore(base, wanted_by_rows(6))
    for restored in found:
        split_over_ranks = [saved for name, saved in restored.saved.items() if name.startswith("t")]
        assert all(saved.alone and len(saved.shards) == 1 for saved in split_over_ranks)
        assert all(not restored.saved[f"step {number}"].alone for number in range(3))
    assert sum(each.received for each in found) >= 3 * 5 - 3  # some of these small tensors share a chunk


Damage = Callable[[Job, str], None]


def flip(job: Job, key: str) -> None:
    data, at = job.bucket.objects[key]
    job.bucket.objects[key] = bytes([data[0] ^ 1]) + data[1:], at


def remove(job: Job, key: str) -> None:
    job.bucket.apply_delete(key)


@pytest.mark.parametrize("damage", [flip, remove])
@pytest.mark.parametrize("part_of_key", ["rank-00004.manifest", "group-001", "/fate"])
def test_all_ranks_raise_the_same_kind_of_error_for_a_damaged_or_missing_object(
    damage: Damage, part_of_key: str
) -> None:
    job = Job(groups=3)
    base = job.save(by_rows(7))
    damage(job, next(key for key in job.bucket.objects if key.endswith(part_of_key)))
    job.restore(base, wanted_by_rows(5))
    assert {type(error) for error in job.errors.values()} == {CorruptionError}
    assert list(job.errors) == list(range(5))
    assert all(part_of_key in str(error) for error in job.errors.values())
    assert job.count("DELETE", "leases/") > 0


def test_all_ranks_learn_that_retention_removes_the_step() -> None:
    job = Job()
    base = job.save(by_rows(3))
    remove(job, next(key for key in job.bucket.objects if key.endswith("/COMMIT")))
    job.restore(base, wanted_by_rows(4))
    assert {type(error) for error in job.errors.values()} == {NotFoundError}
    assert all("is being removed by retention" in str(error) for error in job.errors.values())


def test_all_ranks_learn_why_one_rank_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    base = job.save(by_rows(4))

    def watch(operation: str, key: str, now: float) -> None:
        if operation == "GET" and key.endswith("rank-00002.manifest"):
            raise TransientError("the network is down")

    job.bucket.watch = watch
    job.restore(base, wanted_by_rows(4))
    assert {type(error) for error in job.errors.values()} == {TransientError}
    assert str(job.errors[2]) == "the network is down"
    assert "rank 2 could not take part: TransientError: the network is down" in str(job.errors[0])


def rewritten(job: Job, base: Base, change: Callable[[manifests.Manifest], manifests.Manifest]) -> fetch.Sealed:
    """The decision of a step in which one manifest is another, with the right digest."""
    sealed = job.run([lambda: fetch.sealed(job.store, RUN, base)])[0]
    key = sealed.attempt.manifest_key(1)
    data, at = job.bucket.objects[key]
    data = manifests.encode(change(manifests.decode(data, key)))
    job.bucket.objects[key] = data, at
    digests = list(sealed.digests)
    digests[1] = digest(data)
    return fetch.Sealed(RUN, base, sealed.attempt, tuple(digests))


def without_last(manifest: manifests.Manifest) -> manifests.Manifest:
    return structs.replace(manifest, tensors=manifest.tensors[:-1])


def as_integers(manifest: manifests.Manifest) -> manifests.Manifest:
    tensors = tuple(structs.replace(tensor, dtype="int8") for tensor in manifest.tensors)
    return structs.replace(manifest, tensors=tensors)


@pytest.mark.parametrize(
    ("change", "says"), [(without_last, "its shards hold"), (as_integers, "its shards differ in type")]
)
def test_a_tensor_that_is_not_whole_is_an_error_on_all_ranks(
    change: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    base = job.save(by_rows(3, tensors=1))
    sealed = rewritten(job, base, change)
    monkeypatch.setattr(fetch, "sealed", lambda store, run, base: sealed)
    job.restore(base, wanted_by_rows(2, tensors=1))
    assert {type(error) for error in job.errors.values()} == {CorruptionError}
    assert all(says in str(error) for error in job.errors.values())


def test_a_home_that_leaves_a_shard_out_is_an_error_and_never_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    base = job.save(by_rows(4))
    real = tensor_homes._Tensor.overlapping
    monkeypatch.setattr(tensor_homes._Tensor, "overlapping", lambda self, *box: list(real(self, *box))[1:])
    job.restore(base, wanted_by_rows(3), sent=False)
    assert job.errors
    assert any(isinstance(e, CorruptionError) and "elements to read" in str(e) for e in job.errors.values())


def test_a_reader_that_sends_rows_of_another_tensor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    base = job.save(by_rows(4))
    real = excerpt.excerpt

    def other(manifest: manifests.Manifest, numbers: Sequence[int]) -> Any:
        return real(manifest, [(number + 1) % len(manifest.tensors) for number in numbers])

    monkeypatch.setattr(excerpt, "excerpt", other)
    job.restore(base, wanted_by_rows(3))
    assert {type(error) for error in job.errors.values()} == {CorruptionError}
    assert all("do not agree about the shards" in str(error) for error in job.errors.values())


def test_a_group_whose_shares_are_not_those_of_its_manifests_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(groups=2)
    base = job.save(by_rows(4))
    monkeypatch.setattr(groups, "share_digest", lambda specs: bytes(32))
    job.restore(base, wanted_by_rows(4))
    assert all("does not hold what its rank planned" in str(error) for error in job.errors.values())
    assert len(job.errors) == 4
