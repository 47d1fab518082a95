"""Ranks that hold different bytes under one name are told, by name."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.format import chunking
from headrace.checkpoint.format.chunking import Layout, whole
from headrace.checkpoint.state import replicas, tensors
from headrace.checkpoint.state.flatten import Leaf
from headrace.checkpoint.state.replicas import BLOCK_BYTES, BLOCKS, Divergence, diverged, sample
from headrace.checkpoint.state.save_plan import PreparedSave, Replica, ReplicaSet
from headrace.checkpoint.state.tensors import LocalTensor
from tests.support.ranks import launch


class Together:
    """Ranks that are threads. Counts exchanges."""

    def __init__(self, world: int) -> None:
        self.given: list[Any] = [b""] * world
        self.barrier = threading.Barrier(world)
        self.gathers = 0

    def exchange(self, rank: int, own: Any) -> list[Any]:
        self.given[rank] = own
        self.barrier.wait(150)
        found = list(self.given)
        self.barrier.wait(150)
        return found


class Rank:
    def __init__(self, together: Together, rank: int) -> None:
        self.together, self.rank = together, rank

    def maximum(self, sent: bytes) -> bytes:
        return bytes(map(max, zip(*self.together.exchange(self.rank, sent), strict=True)))

    def all(self, own: bytes) -> Sequence[bytes]:
        self.together.gathers += self.rank == 0
        return self.together.exchange(self.rank, own)

    def all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        given = self.together.exchange(self.rank, dict(sent))
        return {sender: each[self.rank] for sender, each in enumerate(given) if self.rank in each}


def held(name: str, tensor: torch.Tensor) -> Leaf:
    return Leaf(name, LocalTensor(tensor, str(tensor.dtype)[6:], whole(tuple(tensor.shape))), True)


def holding(tree: bytes, replicated: tuple[Replica, ...], here: dict[str, Leaf]) -> PreparedSave:
    return PreparedSave(tree, (), [], Layout((), 0, 0), b"", replicated, here)


def sets_of(rank: int, replicated: Sequence[Replica]) -> tuple[ReplicaSet, ...]:
    """What a rank of a large job knows of these replicas."""
    own: dict[tuple[int, ...], list[str]] = {}
    for replica in sorted(replicated, key=lambda each: each.key):
        if rank in replica.holders:
            own.setdefault(replica.holders, []).append(replica.key)
    return tuple(ReplicaSet(holders, tuple(keys), tuple(keys)) for holders, keys in own.items())


def found(
    world: int, holders: dict[str, tuple[int, ...]], wrong: dict[str, int], in_sets: bool = False
) -> tuple[list[object], int]:
    """What each rank finds; `wrong`: the rank on which a tensor is another one. `in_sets`: as in a large job."""
    together, replicated = Together(world), tuple(Replica(n, n, h) for n, h in holders.items())

    def one(rank: int) -> object:
        here = {n: held(n, torch.full((5,), float(wrong.get(n) == rank))) for n, h in holders.items() if rank in h}
        prepared = holding(b"", () if in_sets else replicated, here)
        if in_sets:
            prepared = replace(prepared, sets=sets_of(rank, replicated))
        return diverged(prepared, Rank(together, rank), 7)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world))), together.gathers


@given(st.data())
def test_exactly_the_tensors_that_differ_are_named_on_every_rank(data: st.DataObject) -> None:
    groups = [(0, 1, 2, 3), (0, 2), (1, 2, 3)]
    holders = {f"t{i}": data.draw(st.sampled_from(groups)) for i in range(data.draw(st.integers(0, 5)))}
    wrong = {n: data.draw(st.sampled_from(h)) for n, h in holders.items() if data.draw(st.booleans())}
    answers, gathers = found(4, holders, wrong)
    assert all(answer == answers[0] for answer in answers)
    names = {each.name: each.ranks for each in answers[0]}  # type: ignore[attr-defined]
    assert set(names) == set(wrong)
    assert all(names[n] == (rank,) for n, rank in wrong.items() if len(holders[n]) > 2)
    assert gathers <= len({holders[n] for n in wrong})  # hashes are exchanged only of sets that differ
    in_sets, gathers = found(4, holders, wrong, in_sets=True)
    assert all(set(answer) == set(answers[0]) for answer in in_sets)  # type: ignore[call-overload]
    assert gathers == bool(wrong)


def test_a_rank_that_cannot_hash_does_not_leave_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    together, replicated = Together(2), (Replica("w", "w", (0, 1)),)

    def hashes(prepared: PreparedSave, step: int) -> dict[str, bytes]:
        if not prepared.tree:
            raise RuntimeError("no memory")
        return {"w": b"12345678"}

    monkeypatch.setattr(replicas, "_hashes", hashes)
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(diverged, holding(t, replicated, {}), Rank(together, r), 1) for r, t in enumerate((b"", b"x"))
        ]
        with pytest.raises(RuntimeError, match="no memory"):
            futures[0].result(150)
        assert futures[1].result(150) == ()


@pytest.mark.parametrize("dtype", sorted(chunking.ITEM_BYTES))
def test_a_sample_is_the_same_however_the_tensor_is_strided_and_of_bounded_size(dtype: str) -> None:
    made = tensors.empty_like("uint8", (48, 64 * 16))
    made.copy_(torch.arange(made.numel()).view(made.shape) % 251)
    tensor = made.view(getattr(torch, dtype))
    strided = torch.cat([made, made], 1).view(getattr(torch, dtype))[:, : tensor.shape[1]]
    for step in (1, 2):
        taken = sample(tensor, step)
        assert taken.numel() == BLOCKS * BLOCK_BYTES
        assert torch.equal(taken, sample(strided, step))
    assert not torch.equal(sample(tensor, 1), sample(tensor, 2))
    assert torch.equal(
        sample(tensor[:1, :3], 1), made.view(tensor.dtype)[:1, :3].contiguous().view(torch.uint8).view(-1)
    )


def test_a_divergence_says_where() -> None:
    assert str(Divergence("model/w", (3,))) == "model/w (rank 3)"
    assert str(Divergence("w", tuple(range(12)))).endswith("7, ...)")


def test_ranks_that_differ_are_refused_or_warned_of_by_name_and_stages_with_names_of_their_own_are_kept(
    tmp_path: Path,
) -> None:
    lines = [each[0] for each in launch(3, "tests.support.replica_ranks", str(tmp_path))]
    for rank, line in enumerate(lines):
        assert line["same"] == line["trusted"] == {"diverged": []}
        assert line["differ"] == {"diverged": ["model/0.weight"]}
        assert line["refused"]["error"] == "MismatchError"
        assert "model/0.weight (rank 1)" in line["refused"]["message"]
        assert line["steps"] == []
        assert bool(line["lines"]) == bool(line["counted"]) == (rank < 2)  # rank 0 and the one that drifted
        assert line["stages"]["error"] == "MismatchError"
        assert "a separate name" in line["stages"]["message"]
        assert line["stages"]["same"]
    assert sum(line["stages"]["bytes"] for line in lines) == 2 * (40 * 40 + 40) * 4  # both stages, once each
