"""The cache's decisions, without disk, threads or stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.dataio.cache.plan import CachePlan, extents
from headrace.dataio.cache.plan.events import Bypass, Create, Drop, Failed, Fetch, Instruction, ObjectId, Ready, Want
from headrace.dataio.cache.plan.ring import MISSED_ANNOUNCEMENTS

BLOCK = 10


def plan(budget: int = 100, **options: int) -> CachePlan:
    return CachePlan(budget, block_bytes=BLOCK, **options)


def obj(key: str, size: int = 50) -> ObjectId:
    return ObjectId("s", key, size, 0.0)


def fetches(instructions: list[Instruction]) -> list[Fetch]:
    return [i for i in instructions if isinstance(i, Fetch)]


def ask(cache: CachePlan, ticket: int, o: ObjectId, blocks: Iterable[int], stream: int = 0) -> list[Instruction]:
    """Request whole blocks."""
    return cache.request(ticket, o, ranges(o, blocks), stream)


def ranges(o: ObjectId, blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    return tuple((block * BLOCK, min(BLOCK, o.size - block * BLOCK)) for block in sorted(blocks))


def wants(o: ObjectId, blocks: Iterable[int], due: float = 0.0) -> list[Want]:
    """One want a block."""
    return [Want(o, ranges(o, [block]), due) for block in blocks]


def announce(cache: CachePlan, stream: int, coming: list[Want], source: str = "s") -> list[Instruction]:
    return cache.announce(stream, source, coming)


def land_all(cache: CachePlan, out: list[Instruction]) -> list[Instruction]:
    """Everything that is fetched lands, and what follows from it; returns all instructions."""
    todo, seen = deque(out), list(out)
    while todo:
        if isinstance(i := todo.popleft(), Fetch):
            more = cache.fetched((i.file, i.block))
            todo.extend(more)
            seen.extend(more)
    return seen


def load(cache: CachePlan, ticket: int, o: ObjectId, blocks: Sequence[int], *, keep: bool = False) -> int:
    """Request and fetch; returns the file."""
    out = ask(cache, ticket, o, blocks)
    for fetch in fetches(out):
        out += cache.fetched((fetch.file, fetch.block))
    ready = [i for i in out if isinstance(i, Ready)]
    assert [r.ticket for r in ready] == [ticket]
    if not keep:
        cache.released(ready[0].file)
    return ready[0].file


def test_a_block_is_fetched_once_for_all_who_ask() -> None:
    cache = plan()
    assert ask(cache, 1, obj("a"), [0]) == [Create(1, obj("a")), Fetch(1, 0, 0, 10)]
    assert ask(cache, 2, obj("a"), [0, 1]) == [Fetch(1, 1, 10, 10)]
    assert cache.fetched((1, 0)) == [Ready(1, 1)]
    assert cache.fetched((1, 1)) == [Ready(2, 1)]
    assert ask(cache, 3, obj("a"), [0, 1]) == [Ready(3, 1)]


def test_the_last_block_is_as_long_as_what_is_left() -> None:
    cache = plan()
    assert fetches(ask(cache, 1, obj("a", 25), [2])) == [Fetch(1, 2, 20, 5)]
    assert cache.used == 5


def test_the_least_recently_used_file_goes_first() -> None:
    cache = plan(100)
    load(cache, 1, obj("a"), [0, 1, 2])
    load(cache, 2, obj("b"), [0, 1, 2])
    load(cache, 3, obj("a"), [0])
    out = ask(cache, 4, obj("c"), [0, 1, 2, 3])
    assert out[0] == Drop(2)
    assert not any(isinstance(i, Bypass) for i in out)


def test_a_held_file_counts_until_it_is_released() -> None:
    cache = plan(100)
    file = load(cache, 1, obj("a"), [0, 1, 2, 3, 4], keep=True)
    load(cache, 2, obj("b"), [0, 1])
    assert ask(cache, 3, obj("c"), [0, 1, 2, 3, 4]) == [Drop(file), Bypass(3)]
    assert cache.counts()["dropped_but_held_bytes"] == 50
    cache.released(file)
    assert cache.counts()["dropped_but_held_bytes"] == 0
    assert len(fetches(ask(cache, 4, obj("c"), [0, 1, 2, 3, 4]))) == 5


def test_a_stubborn_holder_does_not_empty_the_cache() -> None:
    cache = plan(160)
    held = load(cache, 1, obj("a"), [0, 1, 2, 3, 4], keep=True)
    load(cache, 2, obj("b"), [0, 1, 2, 3, 4])
    load(cache, 3, obj("c"), [0, 1, 2, 3])
    assert Drop(held) in ask(cache, 4, obj("d"), [0, 1])
    for ticket in range(5, 9):  # nothing more is thrown out for those who cannot be helped
        assert not any(isinstance(i, Drop) for i in ask(cache, ticket, obj("d"), [0]))
    assert cache.has_all(obj("b"), ranges(obj("b"), range(5)))


def test_a_file_with_a_fetch_in_flight_is_not_evicted() -> None:
    cache = plan(100)
    ask(cache, 1, obj("a", 90), range(9))
    assert ask(cache, 2, obj("b"), [0, 1]) == [Bypass(2)]


def test_a_request_larger_than_the_budget_bypasses_and_evicts_nothing() -> None:
    cache = plan(100)
    load(cache, 1, obj("a"), [0])
    assert ask(cache, 2, obj("b", 200), range(20)) == [Bypass(2)]
    assert cache.has_all(obj("a"), ranges(obj("a"), [0]))


def test_an_object_larger_than_the_budget_begins_anew() -> None:
    cache = plan(100)
    first = load(cache, 1, obj("a", 1000), range(9))
    out = ask(cache, 2, obj("a", 1000), [20, 21, 22])
    assert out[0] == Drop(first)
    assert [f.block for f in fetches(out)] == [20, 21, 22]


def test_a_failed_fetch_wakes_all_who_wait_and_is_not_kept() -> None:
    cache = plan()
    ask(cache, 1, obj("a"), [0, 1])
    ask(cache, 2, obj("a"), [1])
    assert cache.failed(1, 1) == [Failed(1, 1, 1), Failed(2, 1, 1)]
    assert cache.fetched((1, 0)) == []
    assert fetches(ask(cache, 3, obj("a"), [1])) == [Fetch(1, 1, 10, 10)]


def test_a_lost_file_sends_its_waiters_past_the_cache() -> None:
    cache = plan()
    ask(cache, 1, obj("a"), [0, 1])
    ask(cache, 2, obj("a"), [1])
    assert cache.lost(1) == [Drop(1), Bypass(1), Bypass(2)]
    assert cache.used == 0
    assert cache.fetched((1, 0)) == []  # the fetch that was in flight ends in nothing


def test_a_cache_in_trouble_serves_what_it_has() -> None:
    cache = plan()
    file = load(cache, 1, obj("a"), [0])
    cache.set_open(0, open=False)
    assert ask(cache, 2, obj("a"), [0]) == [Ready(2, file)]
    assert ask(cache, 3, obj("a"), [1]) == [Bypass(3)]


def test_the_number_of_files_is_bounded() -> None:
    cache = plan(1000, max_files=2)
    first = load(cache, 1, obj("a"), [0])
    load(cache, 2, obj("b"), [0])
    assert ask(cache, 3, obj("c"), [0])[0] == Drop(first)


def test_announced_blocks_are_fetched_soonest_due_first_and_a_few_at_a_time() -> None:
    cache = plan(4000, prefetch_parts=2)
    out = announce(cache, 1, wants(obj("a"), range(3), due=5.0))
    assert [(f.file, f.block) for f in fetches(out)] == [(1, 0), (1, 1)]
    assert announce(cache, 2, wants(obj("b"), [0], due=1.0)) == []
    assert [(f.file, f.block) for f in fetches(cache.fetched((1, 0)))] == [(2, 0)]
    assert [(f.file, f.block) for f in fetches(cache.fetched((1, 1)))] == [(1, 2)]


def test_a_stream_with_more_than_its_share_in_flight_lets_others_go_first() -> None:
    cache = plan(4000, prefetch_parts=4)
    assert len(fetches(announce(cache, 1, wants(obj("a", 500), range(20), due=1.0)))) == 4
    announce(cache, 2, wants(obj("b", 500), range(20), due=9.0))
    started = [f for block in range(2) for f in fetches(cache.fetched((1, block)))]
    assert {f.file for f in started} == {2}, "due later, but its turn"


def test_a_stream_that_is_over_prefetches_nothing_more() -> None:
    cache = plan(400, prefetch_parts=1)
    announce(cache, 1, wants(obj("a"), range(3)))
    cache.withdraw(1)
    assert cache.fetched((1, 0)) == []


def test_bytes_in_flight_are_bounded_too() -> None:
    cache = plan(4000, prefetch_parts=8)
    cache.prefetch_bytes = 3 * BLOCK
    assert len(fetches(announce(cache, 1, wants(obj("a", 500), range(20))))) == 3


def test_prefetches_that_go_together_start_together_and_what_is_asked_for_does_not_wait_for_that() -> None:
    cache = plan(4000)
    cache.set_prefetch_limits(4, 4 * BLOCK, 2)
    assert len(fetches(announce(cache, 1, wants(obj("a", 500), range(20))))) == 4
    assert cache.fetched((1, 0)) == [], "there is room for one"
    assert [(f.file, f.block) for f in fetches(cache.fetched((1, 1)))] == [(1, 4), (1, 5)]
    assert len(fetches(ask(cache, 1, obj("b"), [0]))) == 1
    assert len(fetches(cache.fetched((1, 2), (1, 3), (1, 4)))) == 3, "and what landed together is followed up together"


def test_of_files_that_somebody_knows_those_that_grew_are_named() -> None:
    cache = plan(4000)
    files = [load(cache, ticket, obj(key, 200), [0, 7]) for ticket, key in enumerate("abc")]
    messages = {file: cache.runs(file, 9) for file in files}
    assert cache.grown(messages, 9, 9) == []
    for ticket, key in enumerate("ab", 10):
        assert load(cache, ticket, obj(key, 200), [1, 4]) in files
    grown = [(0, 2 * BLOCK), (4 * BLOCK, 5 * BLOCK), (7 * BLOCK, 8 * BLOCK)]
    assert cache.grown(messages, 9, 9) == [(files[0], grown), (files[1], grown)]
    assert cache.grown(messages, 1, 9) == [(files[0], grown)]
    assert cache.grown(messages, 9, 2) == [], "in too many runs"
    assert cache.grown({**messages, 99: []}, 9, 9) == [(files[0], grown), (files[1], grown)], "one that is forgotten"


def full_of_pinned(budget: int = 640) -> CachePlan:
    """A cache whose pinned tier is full of blocks of an announced store."""
    cache = plan(budget, prefetch_parts=100)
    cache.prefetch_bytes = 10**9
    land_all(cache, announce(cache, 1, wants(obj("a", 6000), range(budget // BLOCK - 4))))
    return cache


def test_announced_blocks_stay_and_the_rest_passes_through_the_ring() -> None:
    cache = full_of_pinned()
    kept = cache.counts()["pinned_bytes"]
    assert kept == 640 - cache.ring_bytes
    out = ask(cache, 1, obj("b", 600), [3], stream=1)
    file = out[0].file if isinstance(out[0], Create) else 0
    assert out == [Create(file, obj("b", 600), False), Fetch(file, 0, 30, 10)]
    assert cache.fetched((file, 0)) == [Ready(1, file, True), Drop(file, True)]
    assert cache.counts()["dropped_but_held_bytes"] == 10
    cache.released(file)
    assert (cache.counts()["pinned_bytes"], cache.counts()["ring_bytes"]) == (kept, 0)


def test_the_ring_fetches_exactly_what_is_read_and_copies_what_is_pinned() -> None:
    cache = full_of_pinned()
    edge = cache.counts()["pinned_bytes"]
    out = cache.request(1, obj("a", 6000), ((edge - 4, 7),))
    assert fetches(out)[0].length == 7
    assert fetches(out)[0].copies == ((1, edge - 4, 4),)


def test_a_prefetched_read_waits_in_the_ring_until_everybody_who_announced_it_has_read_it() -> None:
    cache = full_of_pinned()
    coming = [Want(obj("b", 600), ((3, 4),))]
    land_all(cache, announce(cache, 1, coming))
    land_all(cache, announce(cache, 2, coming))
    assert cache.counts()["ring_bytes"] == 4
    assert [type(i) for i in cache.request(1, obj("b", 600), ((3, 4),), 1)] == [Ready]
    assert [type(i) for i in cache.request(2, obj("b", 600), ((3, 4),), 2)] == [Ready, Drop]


def test_a_read_that_is_named_no_more_makes_room_after_a_while() -> None:
    cache = full_of_pinned()
    room = cache.ring_bytes * 3 // 4 // BLOCK
    land_all(cache, announce(cache, 1, wants(obj("b", 600), range(room))))
    assert cache.counts()["ring_bytes"] == room * BLOCK
    for _ in range(MISSED_ANNOUNCEMENTS - 1):
        assert announce(cache, 1, wants(obj("c", 600), [0])) == [], "it may only be in the making"
    assert Drop(2, True) in announce(cache, 1, wants(obj("c", 600), [0]))


def test_a_full_ring_holds_prefetching_back_and_sends_readers_past_it() -> None:
    cache = full_of_pinned()
    held = [o for n in range(cache.ring_bytes // BLOCK) for o in land_all(cache, ask(cache, n, obj("b", 600), [n]))]
    assert announce(cache, 1, wants(obj("c", 600), [0])) == []
    assert ask(cache, 99, obj("c", 600), [0]) == [Bypass(99)]
    first, second, *_ = (i.file for i in held if isinstance(i, Ready))
    assert fetches(cache.released(first)) == [], "a quarter is for those who ask"
    assert [f.offset for f in fetches(cache.released(second))] == [0], "what was held back goes on"


def test_when_a_store_is_no_longer_announced_its_blocks_may_go() -> None:
    cache = full_of_pinned()
    assert ask(cache, 1, ObjectId("other", "x", 50, 0.0), [0]) == [Bypass(1)]
    cache.withdraw(1)
    assert ask(cache, 2, ObjectId("other", "x", 50, 0.0), [0])[0] == Drop(1)


def test_an_older_version_of_an_object_goes_when_the_new_one_comes() -> None:
    cache = full_of_pinned()
    newer = ObjectId("s", "a", 6000, 1.0)
    announce(cache, 1, [])
    out = ask(cache, 1, newer, [0])
    assert out[0] == Drop(1) or any(isinstance(i, Create) and not i.keep for i in out)


def test_adopted_blocks_are_on_the_books_and_checked_before_they_are_served() -> None:
    cache = plan(640)
    assert cache.adopt(obj("a"), [0, 2]) == 1
    assert cache.used == 20
    assert not cache.has_all(obj("a"), ((0, 10),))
    assert ask(cache, 1, obj("a"), [0, 1]) == [Fetch(1, 0, 0, 10, (), True), Fetch(1, 1, 10, 10)]
    assert cache.used == 30
    assert cache.failed(1, 0) == [Failed(1, 1, 0)]
    assert cache.used == 30, "its bytes are still on the disk"
    cache.fetched((1, 1))
    assert ask(cache, 2, obj("a"), [0, 1]) == [Fetch(1, 0, 0, 10, (), True)]
    assert cache.fetched((1, 0)) == [Ready(2, 1)]


def test_what_an_earlier_daemon_left_above_the_budget_is_not_adopted() -> None:
    cache = plan(100)
    assert cache.adopt(obj("a"), range(5)) == 1
    assert cache.adopt(obj("b"), range(5)) is None
    assert cache.adopt(ObjectId("s", "a", 50, 9.0), [0]) is None, "one version of an object"


def test_a_smaller_budget_drops_what_is_too_much() -> None:
    cache = plan(200)
    load(cache, 1, obj("a"), range(5))
    load(cache, 2, obj("b"), range(5))
    assert cache.resize(60) == [Drop(1)]
    assert cache.used == 50


def two_tiers(fast: int = 60, slow: int = 400) -> CachePlan:
    return CachePlan((fast, slow), block_bytes=BLOCK)


def used(cache: CachePlan) -> list[int]:
    return [used for _, used, _ in cache.tiers]


def test_blocks_fill_the_fast_tier_first_and_then_the_next() -> None:
    cache = two_tiers()
    for block in range(9):
        land_all(cache, ask(cache, block, obj("a", 400), [block]))
    assert used(cache) == [60, 30]
    assert cache.has_all(obj("a", 400), ranges(obj("a", 400), range(6)))
    assert cache.has_all(obj("a", 400), ranges(obj("a", 400), range(6, 9)))


def test_a_read_over_the_edge_of_two_tiers_copies_what_the_other_has() -> None:
    cache = two_tiers()
    first = load(cache, 1, obj("a", 400), range(6))
    out = cache.request(2, obj("a", 400), ((55, 10),))
    assert [(f.offset, f.copies) for f in fetches(out)] == [(50, ((first, 50, 10),)), (60, ())]


def test_an_announced_read_over_the_edge_of_two_tiers_is_copied_together_and_not_kept_twice() -> None:
    cache = two_tiers()
    land_all(cache, announce(cache, 1, wants(obj("a", 400), range(2))))  # 20 of 60: the ring has 30
    load(cache, 1, obj("a", 400), [2])
    before = used(cache)
    out = cache.request(2, obj("a", 400), ((25, 10),), 1)
    assert [(f.offset, f.length, f.copies) for f in fetches(out)] == [(30, 10, ())], "what neither has is fetched, once"
    out = land_all(cache, out)
    (copied,) = [f for f in fetches(out) if f.copies]
    assert (copied.offset, copied.length, sum(size for _, _, size in copied.copies)) == (25, 10, 10)
    (ready,) = [i for i in out if isinstance(i, Ready)]
    assert (ready.ticket, ready.once) == (2, True)
    cache.released(ready.file)
    assert sum(used(cache)) == sum(before) + BLOCK
    assert cache.has_all(obj("a", 400), ((25, 10),))


def test_of_a_read_over_the_edge_a_lost_tier_sends_the_reader_past_the_cache() -> None:
    cache = two_tiers()
    land_all(cache, announce(cache, 1, wants(obj("a", 400), range(2))))
    load(cache, 1, obj("a", 400), [2])
    (fetch,) = fetches(cache.request(2, obj("a", 400), ((25, 10),), 1))
    assert Bypass(2) in cache.lost(fetch.file)
    assert cache.counts()["waiting"] == 0


def test_announced_blocks_push_others_out_of_the_fast_tier() -> None:
    cache = two_tiers()
    old = load(cache, 1, ObjectId("other", "x", 60, 0.0), range(6))
    out = land_all(cache, announce(cache, 1, wants(obj("a", 400), range(2))))
    assert Drop(old) in out
    assert [i.tier for i in out if isinstance(i, Create)] == [0]


def test_what_was_never_announced_is_evicted_from_the_slow_tier_first() -> None:
    cache = two_tiers(60, 60)
    fast = load(cache, 1, obj("a", 60), range(6))
    slow = load(cache, 2, obj("b", 60), range(6))
    assert used(cache) == [60, 60]
    drops = [i for i in land_all(cache, ask(cache, 3, obj("c", 60), [0])) if isinstance(i, Drop)]
    assert drops == [Drop(slow)]
    assert cache.has_all(obj("a", 60), ranges(obj("a", 60), range(6))), f"file {fast} is in memory"


def test_a_tier_in_trouble_is_gone_around_and_comes_back() -> None:
    cache = two_tiers()
    cache.set_open(0, open=False)
    assert [i.tier for i in ask(cache, 1, obj("a"), [0]) if isinstance(i, Create)] == [1]
    cache.set_open(1, open=False)
    assert ask(cache, 2, obj("b"), [0]) == [Bypass(2)]
    cache.set_open(0, open=True)
    assert [i.tier for i in ask(cache, 3, obj("b"), [0]) if isinstance(i, Create)] == [0]


def test_a_newer_version_replaces_the_older_one_in_every_tier() -> None:
    cache = two_tiers()
    fast = load(cache, 1, obj("a", 400), range(6))
    slow = load(cache, 2, obj("a", 400), [6])
    out = ask(cache, 3, ObjectId("s", "a", 400, 1.0), [0])
    assert {Drop(fast), Drop(slow)} <= set(out)


def test_a_read_that_comes_again_stays_in_the_ring_until_it_comes_no_more() -> None:
    cache = full_of_pinned()
    twice = [Want(obj("b", 600), ((3, 4),), 1.0), Want(obj("b", 600), ((3, 4),), 5.0)]
    land_all(cache, announce(cache, 1, twice))
    assert cache.counts()["reused_bytes"] == 4
    assert [type(i) for i in cache.request(1, obj("b", 600), ((3, 4),), 1)] == [Ready]
    announce(cache, 1, twice[1:])
    assert [type(i) for i in cache.request(2, obj("b", 600), ((3, 4),), 1)] == [Ready, Drop], "fetched once"


def test_of_reads_that_come_again_the_one_that_comes_last_makes_room() -> None:
    cache = plan(640, prefetch_parts=100)
    cache.prefetch_bytes = 10**9
    land_all(cache, announce(cache, 1, [want for n in range(12) for want in wants(obj(f"a{n}"), range(5))]))
    coming = [Want(obj(f"b{n}", 600), ((0, 10),), float(n)) for n in range(60)]
    again = [Want(want.object, want.ranges, want.due + 100) for want in coming]
    land_all(cache, announce(cache, 1, [*coming, *again]))
    kept = [n for n, want in enumerate(coming) if cache.has_all(want.object, want.ranges)]
    assert 5 < len(kept) < 60, "as many as the reserve has room for"
    assert kept == list(range(len(kept))), "those that come first"
    sooner = Want(obj("c", 600), ((0, 10),), 0.5)
    out = land_all(cache, announce(cache, 1, [sooner, *coming, *again]))
    assert cache.has_all(sooner.object, sooner.ranges)
    assert not cache.has_all(coming[kept[-1]].object, coming[kept[-1]].ranges), "it comes last of those that were kept"
    assert sum(isinstance(i, Drop) for i in out) == 1


class PlanMachine(RuleBasedStateMachine):
    """Against a model that only knows which instructions it was given: the bytes that each file must have."""

    budgets: tuple[int, ...] = (240,)

    def __init__(self) -> None:
        super().__init__()
        self.cache = CachePlan(self.budgets, block_bytes=BLOCK, max_files=8, prefetch_parts=2)
        self.tier_of: dict[int, int] = {}
        self.objects = [obj("a", 45), obj("b", 50), obj("c", 400), ObjectId("t", "d", 57, 0.0)]
        self.object_of: dict[int, ObjectId] = {}
        self.live: set[int] = set()
        self.once: set[int] = set()
        self.in_flight: dict[tuple[int, int], Fetch] = {}
        self.bytes: dict[int, set[int]] = {}
        self.holds: dict[int, int] = {}
        self.waiting: dict[int, tuple[ObjectId, set[int]]] = {}
        self.announced: set[str] = set()
        self.streams: dict[int, str] = {}
        self.next_ticket = 0
        if (file := self.cache.adopt(self.objects[1], [1, 3])) is not None:
            self.create(file, self.objects[1], once=False, tier=0)
            self.adopted = {(file, 1), (file, 3)}

    def create(self, file: int, o: ObjectId, *, once: bool, tier: int) -> None:
        assert file not in self.object_of
        blocks = {(self.object_of[f], self.tier_of[f]) for f in self.live - self.once}
        assert once or (o, tier) not in blocks, "one block file per object and tier"
        self.tier_of[file] = tier
        self.object_of[file], self.bytes[file], self.holds[file] = o, set(), 0
        self.live.add(file)
        if once:
            self.once.add(file)

    def execute(self, instructions: list[Instruction], failing: tuple[int, int] | None = None) -> None:
        for i in instructions:
            match i:
                case Create(file, o, keep, tier):
                    self.create(file, o, once=not keep, tier=tier)
                case Fetch(file, block, offset, length, here, adopted):
                    assert file in self.live
                    assert (file, block) not in self.in_flight, "one fetch per part"
                    copied = {byte for other, at, size in here if other == file for byte in range(at, at + size)}
                    assert self.bytes[file] & set(range(offset, offset + length)) <= copied, (
                        "and only what is not there"
                    )
                    assert adopted == ((file, block) in self.adopted)
                    self.adopted.discard((file, block))
                    for other, at, size in here:
                        assert other in self.live
                        assert self.bytes[other] >= set(range(at, at + size)), "copied from where it is"
                    assert 0 < length <= BLOCK
                    self.in_flight[file, block] = i
                case Drop(file, once):
                    assert once == (file in self.once)
                    assert not any(f == file for f, _ in self.in_flight), "nothing in flight is evicted"
                    self.live.remove(file)
                    self.bury(file)
                case Ready(ticket, file, once):
                    o, wanted = self.waiting.pop(ticket)
                    assert self.object_of[file] == o
                    assert once == (file in self.once)
                    assert wanted <= self.bytes[file], "every byte that was asked for"
                    self.holds[file] += 1
                case Bypass(ticket):
                    del self.waiting[ticket]
                case Failed(ticket, file, block):
                    assert failing == (file, block)
                    del self.waiting[ticket]

    def bury(self, file: int) -> None:
        if not self.holds[file] and file not in self.live:
            del self.bytes[file]
            self.adopted = {(f, b) for f, b in self.adopted if f != file}

    @rule(data=st.data(), which=st.integers(0, 3), stream=st.integers(0, 2))
    def request(self, data: st.DataObject, which: int, stream: int) -> None:
        o = self.objects[which]
        asked = data.draw(some_ranges(o))
        self.waiting[self.next_ticket] = (o, {at for first, size in asked for at in range(first, first + size)})
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.execute(self.cache.request(ticket, o, asked, stream))

    @rule(data=st.data(), stream=st.integers(1, 2), source=st.sampled_from(["s", "s", "t"]))
    def announce(self, data: st.DataObject, stream: int, source: str) -> None:
        coming = [
            Want(o, data.draw(some_ranges(o)), data.draw(st.integers(0, 9)))
            for o in data.draw(st.lists(st.sampled_from([o for o in self.objects if o.source == source]), max_size=5))
        ]
        self.streams[stream] = source
        self.execute(self.cache.announce(stream, source, coming))

    @rule(stream=st.integers(1, 2))
    def withdraw(self, stream: int) -> None:
        self.streams.pop(stream, None)
        self.execute(self.cache.withdraw(stream))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), outcome=st.sampled_from(["fetched", "fetched", "fetched", "failed", "lost"]))
    def land(self, data: st.DataObject, outcome: str) -> None:
        file, block = data.draw(st.sampled_from(sorted(self.in_flight)))
        if outcome == "lost":
            gone = {place: fetch for place, fetch in self.in_flight.items() if place[0] == file}
            self.in_flight = {place: fetch for place, fetch in self.in_flight.items() if place[0] != file}
            self.adopted |= {place for place, fetch in gone.items() if fetch.adopted}  # still on the disk while held
            self.execute(self.cache.lost(file))
            return
        fetch = self.in_flight.pop((file, block))
        if outcome == "fetched":
            self.bytes[file] |= set(range(fetch.offset, fetch.offset + fetch.length))
            self.execute(self.cache.fetched((file, block)))
        else:
            if fetch.adopted:
                self.adopted.add((file, block))
            self.execute(self.cache.failed(file, block), failing=(file, block))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def land_together(self, data: st.DataObject) -> None:
        places = data.draw(st.lists(st.sampled_from(sorted(self.in_flight)), min_size=1, max_size=4, unique=True))
        for place in places:
            fetch = self.in_flight.pop(place)
            self.bytes[place[0]] |= set(range(fetch.offset, fetch.offset + fetch.length))
        self.execute(self.cache.fetched(*places))

    @rule(parts=st.integers(1, 6), together=st.integers(1, 4))
    def ahead(self, parts: int, together: int) -> None:
        self.cache.set_prefetch_limits(parts, parts * BLOCK, min(parts, together))

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(sorted(f for f, n in self.holds.items() if n)))
        self.holds[file] -= 1
        self.bury(file)
        self.execute(self.cache.released(file))

    @rule(data=st.data(), well=st.sampled_from([True, True, False]))
    def trouble(self, data: st.DataObject, well: bool) -> None:
        self.cache.set_open(data.draw(st.integers(0, len(self.budgets) - 1)), open=well)

    @invariant()
    def never_over_budget(self) -> None:
        assert all(used <= budget for budget, used, _ in self.cache.tiers)

    @invariant()
    def each_tier_counts_its_own_files(self) -> None:
        for tier, (_, used, _) in enumerate(self.cache.tiers):
            here = [f for f in self.bytes if self.tier_of[f] == tier]
            flying = sum(fetch.length for (f, _), fetch in self.in_flight.items() if self.tier_of[f] == tier)
            left = sum(
                min(BLOCK, self.object_of[f].size - b * BLOCK) for f, b in self.adopted if self.tier_of[f] == tier
            )
            self.check_used(used, sum(len(self.bytes[f]) for f in here) + left, flying)

    def check_used(self, used: int, present: int, flying: int) -> None:
        assert used == present + flying

    @invariant()
    def the_books_are_right(self) -> None:
        flying = sum(fetch.length for fetch in self.in_flight.values())
        left = sum(min(BLOCK, self.object_of[f].size - b * BLOCK) for f, b in self.adopted)
        self.check_used(self.cache.used, sum(map(len, self.bytes.values())) + left, flying)
        assert len(self.live - self.once) <= 8

    @invariant()
    def no_wake_up_is_lost(self) -> None:
        """Whoever waits, waits for a part that is in flight."""
        for o, wanted in self.waiting.values():
            assert any(
                self.object_of[f] == o and wanted & set(range(fetch.offset, fetch.offset + fetch.length))
                for (f, _), fetch in self.in_flight.items()
            )

    def teardown(self) -> None:
        while self.waiting and self.in_flight:
            (file, block), fetch = self.in_flight.popitem()
            self.bytes[file] |= set(range(fetch.offset, fetch.offset + fetch.length))
            self.execute(self.cache.fetched((file, block)))
        assert not self.waiting


def some_ranges(o: ObjectId) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    one = st.tuples(st.integers(0, o.size - 1), st.integers(0, 12))
    return st.lists(one, max_size=4).map(lambda drawn: tuple((at, min(size, o.size - at)) for at, size in drawn))


TestPlanMachine = PlanMachine.TestCase
TestPlanMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TieredPlanMachine(PlanMachine):
    budgets = (70, 160)


TestTieredPlanMachine = TieredPlanMachine.TestCase
TestTieredPlanMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class PartsPlanMachine(PlanMachine):
    """Some reads leave out so much that they get only their own bytes."""

    budgets = (160, 160)

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(extents, "HOLE_BYTES", 15)
        self.patch.setattr(extents, "GAP_BYTES", 3)
        super().__init__()

    def check_used(self, used: int, present: int, flying: int) -> None:
        assert present <= used <= present + flying, (
            "bytes that two parts bring count once, at the latest when they are here"
        )

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()


def test_blocks_around_parts_in_flight_that_complete_a_read_over_two_tiers_stay_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extents, "HOLE_BYTES", 15)
    monkeypatch.setattr(extents, "GAP_BYTES", 3)
    cache = CachePlan((60, 60), block_bytes=BLOCK)
    announce(cache, 1, [])
    film = obj("a", 60)
    land_all(cache, cache.request(1, film, ((20, 20),), 1))
    land_all(cache, cache.request(2, obj("b", 40), ((0, 40),), 1))
    parts = cache.request(3, film, ((10, 10), (40, 8)), 1)
    assert [used for _, used, _ in cache.tiers] == [20, 58], "the blocks are in one tier, the parts in the other"
    out = cache.request(4, film, ((10, 40),), 1)
    assert all(used <= budget for budget, used, _ in cache.tiers)
    assert {i.ticket for i in land_all(cache, [*parts, *out]) if isinstance(i, Ready | Bypass)} == {3, 4}


def test_a_fetch_takes_bytes_that_its_file_has_from_there_and_not_from_another_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extents, "HOLE_BYTES", 15)
    monkeypatch.setattr(extents, "GAP_BYTES", 3)
    cache = CachePlan((40, 100), block_bytes=BLOCK)
    film = obj("a", 60)
    land_all(cache, cache.request(1, obj("b", 30), ((0, 30),)))
    land_all(cache, cache.request(2, film, ((10, 10),)))  # the first tier is full now
    land_all(cache, cache.request(3, film, ((15, 3), (40, 4))))
    out = cache.request(4, film, ((0, 0), (12, 8), (20, 2), (60, 0)))
    slow = [f for f in fetches(out) if cache.tier_of(f.file) == 1]
    assert [(f.offset, f.length) for f in slow] == [(12, 10)]
    assert sorted((cache.tier_of(file), at, size) for file, at, size in slow[0].copies) == [
        (0, 12, 3),
        (0, 18, 2),
        (1, 15, 3),
    ]


TestPartsPlanMachine = PartsPlanMachine.TestCase
TestPartsPlanMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_trainer_that_starts_again_does_not_evict_its_own_blocks_before_it_announces() -> None:
    cache = full_of_pinned()
    cache.withdraw(1)
    out = ask(cache, 1, obj("z", 600), range(20))
    assert not any(isinstance(i, Drop) for i in out)
