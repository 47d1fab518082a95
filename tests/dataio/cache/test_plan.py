"""The cache's decisions, without disk, threads or stores."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataio.cache.plan import Bypass, CachePlan, Create, Drop, Failed, Fetch, Instruction, ObjectId, Ready

BLOCK = 10


def plan(budget: int = 100, **options: int) -> CachePlan:
    return CachePlan(budget, block_bytes=BLOCK, **options)


def obj(key: str, size: int = 50) -> ObjectId:
    return ObjectId("s", key, size, 0.0)


def fetches(instructions: list[Instruction]) -> list[Fetch]:
    return [i for i in instructions if isinstance(i, Fetch)]


def load(cache: CachePlan, ticket: int, o: ObjectId, blocks: list[int], *, keep: bool = False) -> int:
    """Request and fetch; returns the file."""
    out = cache.request(ticket, o, blocks)
    for fetch in fetches(out):
        out += cache.fetched(fetch.file, fetch.block)
    ready = [i for i in out if isinstance(i, Ready)]
    assert [r.ticket for r in ready] == [ticket]
    if not keep:
        cache.released(ready[0].file)
    return ready[0].file


def test_a_block_is_fetched_once_for_all_who_ask() -> None:
    cache = plan()
    assert cache.request(1, obj("a"), [0]) == [Create(1, obj("a")), Fetch(1, 0, 0, 10)]
    assert cache.request(2, obj("a"), [0, 1]) == [Fetch(1, 1, 10, 10)]
    assert cache.fetched(1, 0) == [Ready(1, 1)]
    assert cache.fetched(1, 1) == [Ready(2, 1)]
    assert cache.request(3, obj("a"), [0, 1]) == [Ready(3, 1)]


def test_the_last_block_is_as_long_as_what_is_left() -> None:
    cache = plan()
    assert fetches(cache.request(1, obj("a", 25), [2])) == [Fetch(1, 2, 20, 5)]
    assert cache.used == 5


def test_the_least_recently_used_file_goes_first() -> None:
    cache = plan(100)
    load(cache, 1, obj("a"), [0, 1, 2])
    load(cache, 2, obj("b"), [0, 1, 2])
    load(cache, 3, obj("a"), [0])
    out = cache.request(4, obj("c"), [0, 1, 2, 3])
    assert out[0] == Drop(2)
    assert not any(isinstance(i, Bypass) for i in out)


def test_a_held_file_counts_until_it_is_released() -> None:
    cache = plan(100)
    file = load(cache, 1, obj("a"), [0, 1, 2, 3, 4], keep=True)
    load(cache, 2, obj("b"), [0, 1])
    assert cache.request(3, obj("c"), [0, 1, 2, 3, 4]) == [Drop(file), Bypass(3)]
    assert cache.counts()["dropped_but_held_bytes"] == 50
    cache.released(file)
    assert cache.counts()["dropped_but_held_bytes"] == 0
    assert len(fetches(cache.request(4, obj("c"), [0, 1, 2, 3, 4]))) == 5


def test_a_stubborn_holder_does_not_empty_the_cache() -> None:
    cache = plan(160)
    held = load(cache, 1, obj("a"), [0, 1, 2, 3, 4], keep=True)
    load(cache, 2, obj("b"), [0, 1, 2, 3, 4])
    load(cache, 3, obj("c"), [0, 1, 2, 3])
    assert Drop(held) in cache.request(4, obj("d"), [0, 1])
    for ticket in range(5, 9):  # nothing more is thrown out for those who cannot be helped
        assert not any(isinstance(i, Drop) for i in cache.request(ticket, obj("d"), [0]))
    assert cache.has_all(obj("b"), [0, 1, 2, 3, 4])


def test_a_file_with_a_fetch_in_flight_is_not_evicted() -> None:
    cache = plan(100)
    cache.request(1, obj("a", 90), range(9))
    assert cache.request(2, obj("b"), [0, 1]) == [Bypass(2)]


def test_a_request_larger_than_the_budget_bypasses_and_evicts_nothing() -> None:
    cache = plan(100)
    load(cache, 1, obj("a"), [0])
    assert cache.request(2, obj("b", 200), range(20)) == [Bypass(2)]
    assert cache.has_all(obj("a"), [0])


def test_an_object_larger_than_the_budget_begins_anew() -> None:
    cache = plan(100)
    first = load(cache, 1, obj("a", 1000), range(9))
    out = cache.request(2, obj("a", 1000), [20, 21, 22])
    assert out[0] == Drop(first)
    assert [f.block for f in fetches(out)] == [20, 21, 22]


def test_a_failed_fetch_wakes_all_who_wait_and_is_not_kept() -> None:
    cache = plan()
    cache.request(1, obj("a"), [0, 1])
    cache.request(2, obj("a"), [1])
    assert cache.failed(1, 1) == [Failed(1, 1, 1), Failed(2, 1, 1)]
    assert cache.fetched(1, 0) == []
    assert fetches(cache.request(3, obj("a"), [1])) == [Fetch(1, 1, 10, 10)]


def test_a_lost_file_sends_its_waiters_past_the_cache() -> None:
    cache = plan()
    cache.request(1, obj("a"), [0, 1])
    cache.request(2, obj("a"), [1])
    assert cache.lost(1) == [Drop(1), Bypass(1), Bypass(2)]
    assert cache.used == 0
    assert cache.fetched(1, 0) == []  # the fetch that was in flight ends in nothing


def test_a_cache_in_trouble_serves_what_it_has() -> None:
    cache = plan()
    file = load(cache, 1, obj("a"), [0])
    cache.admitting = False
    assert cache.request(2, obj("a"), [0]) == [Ready(2, file)]
    assert cache.request(3, obj("a"), [1]) == [Bypass(3)]


def test_the_number_of_files_is_bounded() -> None:
    cache = plan(1000, max_files=2)
    first = load(cache, 1, obj("a"), [0])
    load(cache, 2, obj("b"), [0])
    assert cache.request(3, obj("c"), [0])[0] == Drop(first)


def test_announced_blocks_are_fetched_streams_in_turn_and_a_few_at_a_time() -> None:
    cache = plan(400, prefetch_blocks=2)
    out = cache.announce(1, [(obj("a"), b) for b in range(5)])
    assert [(f.file, f.block) for f in fetches(out)] == [(1, 0), (1, 1)]
    assert cache.announce(2, [(obj("b"), 0)]) == []
    out = cache.fetched(1, 0)
    assert [(f.file, f.block) for f in fetches(out)] == [(1, 2)]
    assert [(f.file, f.block) for f in fetches(cache.fetched(1, 1))] == [(2, 0)]
    cache.announce(1, [])
    assert cache.fetched(1, 2) == cache.fetched(2, 0) == []


def test_prefetching_looks_no_further_than_a_quarter_of_the_budget() -> None:
    cache = plan(400, prefetch_blocks=100)
    assert len(fetches(cache.announce(1, [(obj("a", 1000), b) for b in range(100)]))) == 10


class PlanMachine(RuleBasedStateMachine):
    """Against a model that only knows which instructions it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = plan(120, max_files=3, prefetch_blocks=2)
        self.objects = [obj("a", 45), obj("b", 50), obj("c", 200), obj("d", 7)]
        self.live: dict[int, ObjectId] = {}
        self.content: dict[int, set[int]] = {}
        self.flying: set[tuple[int, int]] = set()
        self.holds: dict[int, int] = {}
        self.waiting: dict[int, tuple[ObjectId, set[int]]] = {}
        self.next_ticket = 0

    def cost(self, o: ObjectId, block: int) -> int:
        return min(BLOCK, o.size - block * BLOCK)

    def execute(self, instructions: list[Instruction], failing: tuple[int, int] | None = None) -> None:
        for i in instructions:
            match i:
                case Create(file, o):
                    assert o not in self.live.values(), "one file per object"
                    self.live[file], self.content[file], self.holds[file] = o, set(), 0
                case Fetch(file, block, offset, length):
                    assert file in self.live
                    assert (file, block) not in self.flying, "one fetch per block"
                    assert block not in self.content[file]
                    assert (offset, length) == (block * BLOCK, self.cost(self.live[file], block))
                    self.flying.add((file, block))
                case Drop(file):
                    assert not any(f == file for f, _ in self.flying), "nothing in flight is evicted"
                    self.gone(file)
                case Ready(ticket, file):
                    o, blocks = self.waiting.pop(ticket)
                    assert self.live[file] == o
                    assert blocks <= self.content[file]
                    self.holds[file] += 1
                case Bypass(ticket):
                    del self.waiting[ticket]
                case Failed(ticket, file, block):
                    assert failing == (file, block)
                    assert block in self.waiting.pop(ticket)[1]

    def gone(self, file: int) -> None:
        self.objects_of = {**getattr(self, "objects_of", {}), file: self.live.pop(file)}
        if not self.holds[file]:
            del self.content[file], self.holds[file]

    def held_bytes(self) -> int:
        objects = {**getattr(self, "objects_of", {}), **self.live}
        content = {(f, b) for f, blocks in self.content.items() for b in blocks} | self.flying
        return sum(self.cost(objects[f], b) for f, b in content)

    @rule(data=st.data(), which=st.integers(0, 3))
    def request(self, data: st.DataObject, which: int) -> None:
        o = self.objects[which]
        count = -(-o.size // BLOCK)
        blocks = data.draw(st.sets(st.integers(0, count - 1), max_size=6))
        self.waiting[self.next_ticket] = (o, blocks)
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.execute(self.cache.request(ticket, o, blocks))

    @rule(data=st.data(), stream=st.integers(1, 2))
    def announce(self, data: st.DataObject, stream: int) -> None:
        everything = [(o, b) for o in self.objects for b in range(-(-o.size // BLOCK))]
        self.execute(self.cache.announce(stream, data.draw(st.lists(st.sampled_from(everything), max_size=5))))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=st.sampled_from(["fetched", "fetched", "failed", "lost"]))
    def land(self, data: st.DataObject, outcome: str) -> None:
        file, block = data.draw(st.sampled_from(sorted(self.flying)))
        if outcome == "lost":
            self.flying = {(f, b) for f, b in self.flying if f != file}
            self.execute(self.cache.lost(file))
            return
        self.flying.remove((file, block))
        if outcome == "fetched":
            self.content[file].add(block)
            self.execute(self.cache.fetched(file, block))
        else:
            self.execute(self.cache.failed(file, block), failing=(file, block))

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(sorted(f for f, n in self.holds.items() if n)))
        self.holds[file] -= 1
        if not self.holds[file] and file not in self.live:
            del self.content[file], self.holds[file]
        self.execute(self.cache.released(file))

    @rule(admitting=st.booleans())
    def trouble(self, admitting: bool) -> None:
        self.cache.admitting = admitting

    @invariant()
    def never_over_budget(self) -> None:
        assert self.cache.used <= self.cache.budget

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.cache.used == self.held_bytes()
        assert len(self.live) <= self.cache.max_files

    @invariant()
    def no_wake_up_is_lost(self) -> None:
        """Whoever waits, waits for a block that is in flight."""
        for o, blocks in self.waiting.values():
            assert any((f, b) in self.flying for f, other in self.live.items() if other == o for b in blocks)

    def teardown(self) -> None:
        for file, block in sorted(self.flying):
            self.flying.discard((file, block))
            self.content[file].add(block)
            self.execute([i for i in self.cache.fetched(file, block) if not isinstance(i, Fetch | Create | Drop)])
        # prefetches that those landings started are not landed: nobody waits for them
        assert not self.waiting


TestPlanMachine = PlanMachine.TestCase
TestPlanMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
