"""Savers, a takeover and a fencing collector, interleaved at random, one store operation at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Commit, Decision, Timeline, decode, encode, this_process
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.commit import Attempt, Committed, Stop, WriteCommit, WriteDecision, decide
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.core.limits import SMALL_OBJECT_BYTES
from headrace.dataio.store.base import Buffer, Location, ObjectInfo, Store

pytestmark = pytest.mark.slow

IDS = ["01HZZZZZZZ000000000000000A", "01HZZZZZZZ000000000000000B"]


class MemoryStore(Store):
    """Objects in a dict, enough for the commit protocol."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    @property
    def location(self) -> Location:
        return Location("memory://", {}, False)

    def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
        if key not in self.objects:
            raise NotFoundError(key)
        return self.objects[key]

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        raise AssertionError

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        raise AssertionError

    def put(self, key: str, data: Buffer) -> None:
        self.objects[key] = bytes(data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self.objects.setdefault(key, bytes(data)) == bytes(data)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        raise AssertionError

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(k, len(v), 0.0) for k, v in sorted(self.objects.items()) if k.startswith(prefix)])

    def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.get(key)), 0.0)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


def saver(store: Store, attempt: Attempt, rank: int) -> Iterator[str]:
    """A rank of an attempt; every `yield` is a place where others may act."""
    store.put_if_absent(attempt.manifest_key(rank), b"manifest")
    while True:
        yield "looking"
        view = commit.look(store, attempt, lease_alive=True)
        yield "deciding"
        match decide(attempt, view):
            case Committed():
                yield "committed"
                return
            case Stop():
                yield "stopped"
                return
            case WriteDecision():
                decision = Decision(attempt=attempt.id, outcome="commit", manifests=("x",) * attempt.world_size)
                store.put_if_absent(attempt.decision_key, encode(decision))
            case WriteCommit():
                commit.write_commit(store, attempt)


def takeover(store: Store) -> Iterator[str]:
    yield "starting"
    document = Timeline(run="r", timeline=2, parent=None, created=0.0, process=this_process())
    store.put_if_absent(names.timeline("r", 2), encode(document))


def collector(store: Store, attempts: Sequence[Attempt]) -> Iterator[str]:
    """Abort all attempts without a decision, as if every lease had expired."""
    for attempt in attempts:
        yield "fencing"
        store.put_if_absent(attempt.decision_key, encode(Decision(attempt=attempt.id, outcome="abort")))


def helper(store: Store, attempts: Sequence[Attempt]) -> Iterator[str]:
    for attempt in attempts:
        yield "helping"
        commit.recognise(store, attempt)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.sets(st.sampled_from(["takeover", "collector", "helper"])))
def test_however_they_interleave_a_step_is_one_complete_attempt(order: list[int], others: set[str]) -> None:
    store = MemoryStore()
    attempts = [Attempt("r", 1, 5, name, 2) for name in IDS]
    actors = [saver(store, attempt, rank) for attempt in attempts for rank in range(2)]
    actors += [takeover(store)] if "takeover" in others else []
    actors += [collector(store, attempts)] if "collector" in others else []
    actors += [helper(store, attempts)] if "helper" in others else []
    last = [""] * len(actors)
    seen: set[str] = set()
    for turn in order + list(range(len(actors))) * 20:
        if turn < len(actors):
            last[turn] = next(actors[turn], last[turn])
        if attempts[0].commit_key in store.objects:
            seen.add(decode(store.objects[attempts[0].commit_key], Commit, "COMMIT").attempt)
    assert len(seen) <= 1  # COMMIT never changes
    outcome = {attempt.id: set(last[2 * i : 2 * i + 2]) for i, attempt in enumerate(attempts)}
    for attempt in attempts:
        received = outcome[attempt.id]
        assert received <= {"committed", "stopped"}  # no writer hangs
        if attempt.id not in seen:
            assert received == {"stopped"}  # nothing is reported as committed that is not
        elif "takeover" not in others:  # else a rank may stop for the new timeline just before another seals the fate
            assert received == {"committed"}
        if attempt.id in seen:
            assert decode(store.objects[attempt.decision_key], Decision, "fate").outcome == "commit"
    if not others - {"helper"}:
        assert len(seen) == 1
