"""Large jobs commit in groups: the real code of all ranks in virtual time, with small groups, and damaged objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from headrace.checkpoint.format import group as groups
from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Box, TensorSpec
from headrace.checkpoint.format.documents import Base, Commit, Decision, Repo, encode, read
from headrace.checkpoint.repository import collect, commit, fetch, group_commit, inventory, lease, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt, FinalError, LateError
from headrace.checkpoint.repository.group_commit import finish_alone
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.executor import own_manifest_of
from headrace.checkpoint.saving.plan import OwnManifest
from headrace.checkpoint.saving.progress import ProgressFile
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, MismatchError, UnsupportedError
from headrace.dataio.testing.simulation.scheduler import Process, Simulation
from headrace.dataio.testing.simulation.store import Bucket, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched
from tests.support.checkpoint_states import RUN, make, whole_tensors

WORLD, GROUP, EACH = 25, 10, 16
REAL_JOIN = groups.join
BYTES = bytes(range(EACH))
LATENCY, TIMEOUT = 0.02, 300.0
Fault = Callable[[int, str, str], None]


def share(rank: int, name: str = "w") -> tuple[str, Box, bytes]:
    """A rank's part of a tensor that all ranks hold in parts."""
    return name, Box((EACH * WORLD,), (EACH * rank,), (EACH,)), rank.to_bytes(4, "big") + BYTES[4:]


@pytest.fixture(autouse=True)
def _groups_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "GROUP_RANKS", GROUP)


PLAN = groups.plan_digest(
    [groups.share_digest([TensorSpec("w", "uint8", share(rank)[1], replicated=True)]) for rank in range(WORLD)]
)


@dataclass
class Job:
    """Many ranks that save, each in a separate process. `outcomes`: the report or the error of each save, by rank."""

    latency: float = LATENCY
    outcomes: dict[int, object] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.simulation = Simulation(1)
        self.bucket = Bucket(self.simulation, latency=self.latency)
        self.store, self.clock = SimulatedStore(self.bucket), self.simulation.clock
        self.sent: list[tuple[float, str, str, str]] = []
        self.at_request: Fault = lambda rank, operation, key: None
        self.bucket.watch = self._watch
        self.bucket.apply_put(names.REPO, encode(Repo(id=names.new_id(self.clock), created=0.0)))
        self.own: dict[int, OwnManifest | None] = {}
        self.failed_ranks: Callable[[Sequence[int]], str] = commit.no_failed_ranks
        self.killed = -1

    def save(
        self,
        step: int = 1,
        *,
        number: int = 1,
        ranks: Sequence[int] = range(WORLD),
        bases: tuple[Base, ...] = (),
        plans: dict[int, bytes] | None = None,
        states: dict[int, tuple[str, Box, bytes]] | None = None,
        delay: Callable[[int], float] = lambda rank: 0.0,
    ) -> Base:
        """Let these ranks save the step, run everything to its end, and return the attempt."""
        attempt = names.new_id(self.clock)
        if not timeline.numbers(_Direct(self.bucket), RUN):
            self.run(lambda: timeline.open_timeline(self.store, RUN, None, self.clock))
        for rank in ranks:
            put = partial(
                make,
                self.store,
                [(states or {}).get(rank, share(rank))],
                step=step,
                number=number,
                attempt=attempt,
                bases=bases,
                rank=rank,
                world_size=WORLD,
                replicas=(plans or {}).get(rank, PLAN),
                own_manifest=self.own.get(rank),
                commit_timeout=TIMEOUT,
                lease_seconds=60.0,
                metadata={"rank": rank, "step": step},
            )
            process = Process(str(rank))
            self.simulation.start(self._one, rank, put, at=self.simulation.now + delay(rank), process=process)
        self.run()
        return Base(number, step, attempt)

    def run(self, work: Callable[[], object] | None = None) -> Any:
        """Run `work`, or what was started, to its end."""
        with patched(self.simulation, lease, fetch, inventory, group_commit):
            task = self.simulation.start(work) if work is not None else None
            self.simulation.run()
        if task is not None and task.error is not None:
            raise task.error
        return task.result if task is not None else None

    def count(self, part: str = "", operation: str = "", since: float = 0.0) -> int:
        """How many requests with this part in the key were sent."""
        return sum(part in key and operation in what and at >= since for at, _, what, key in self.sent)

    def _one(self, rank: int, put: Callable[[], Any]) -> None:
        made, progress = put(), ProgressFile(None)
        self.own.pop(rank, None)
        try:
            self.outcomes[rank] = result = commit_staged(
                made.arena,
                made.plan,
                lambda _: None,
                store=self.store,
                progress=progress,
                clock=self.clock,
                failed_ranks=self.failed_ranks,
            )
            self.own[rank] = own_manifest_of(result, progress.manifest if rank % 2 else None)
        except HeadraceError as error:
            self.outcomes[rank] = error
        self.ended[rank] = self.simulation.now

    def _watch(self, operation: str, key: str, now: float) -> None:
        name = self.simulation.process.name
        self.sent.append((now, name, operation, key))
        if name.isdecimal():
            self.at_request(int(name), operation, key)

    def kill_at(self, rank: int, operation: str, part: str) -> None:
        """Kill this rank when it sends such a request, before it is applied."""

        def strike(who: int, what: str, key: str) -> None:
            if who == rank and what == operation and part in key:
                self.killed = rank
                self.simulation.kill(self.simulation.process)

        self.at_request = strike


class _Direct(SimulatedStore):
    """Reads the bucket without requests, from outside of the simulation."""

    def list(self, prefix: str = "") -> Any:
        return self._page(prefix, "")

    def list_folders(self, prefix: str = "", *, after: str = "") -> Any:
        return self.bucket.folders(prefix, after)


def committed(job: Job, base: Base) -> bool:
    return names.commit(RUN, base.timeline, base.step) in job.bucket.objects


def contents(job: Job, base: Base) -> dict[str, bytes]:
    found = job.run(lambda: whole_tensors(job.store, fetch.open_step(job.store, RUN, base)))
    assert isinstance(found, dict)
    return found


WHOLE = {"w": b"".join(share(rank)[2] for rank in range(WORLD))}


def test_all_ranks_commit_one_step_in_three_groups_with_a_few_requests_each() -> None:
    job = Job()
    base = job.save()
    requests, packs = job.count(), job.count("packs/", "PUT")
    by_rank = Counter(name for _, name, _, _ in job.sent)
    assert len(job.outcomes) == WORLD
    assert {type(outcome) for outcome in job.outcomes.values()} == {dict}
    decision = job.run(lambda: read(job.store, names.decision(RUN, 1, 1, base.attempt), Decision))
    assert (decision.version, decision.world_size, len(decision.groups), decision.manifests) == (2, WORLD, 3, ())
    assert decision.values() == {"rank": 0, "step": 1}
    assert contents(job, base) == WHOLE
    assert packs == WORLD
    assert requests - packs < 5 * WORLD
    assert len({name for _, name, operation, key in job.sent if operation == "PUT" and "leases/" in key}) == 3
    assert {by_rank[str(rank)] for rank in range(WORLD) if rank % GROUP} == {3}  # its pack, its manifest, COMMIT


def test_the_step_is_committed_soon_after_the_last_manifest() -> None:
    job = Job()
    base = job.save(delay=lambda rank: 40.0 if rank == 13 else 0.0)
    manifest = next(at for at, _, what, key in job.sent if what == "PUT" and "rank-00013" in key)
    written = next(at for at, _, what, key in job.sent if what == "PUT" and "COMMIT" in key)
    assert committed(job, base)
    assert written - manifest < 1.5


@pytest.mark.parametrize(
    ("operation", "part"),
    [("LIST", "/group-"), ("PUT", "/group-001"), ("PUT", "/fate"), ("PUT", "/COMMIT"), ("DELETE", "leases/")],
)
def test_the_death_of_a_head_that_has_its_manifest_delays_the_step_only(operation: str, part: str) -> None:
    job = Job()
    job.kill_at(10, operation, part)
    base = job.save(delay=lambda rank: 5.0 if rank // GROUP == 1 else 0.0)  # so the head of group 1 is the last
    assert job.killed == 10
    assert contents(job, base) == WHOLE
    others = [outcome for rank, outcome in job.outcomes.items() if rank != 10]
    assert {type(outcome) for outcome in others} == {dict}
    assert max(job.ended.values()) < 60


def test_the_death_of_all_heads_before_their_groups_delays_the_step_only() -> None:
    job = Job()

    def strike(who: int, what: str, key: str) -> None:
        if who % GROUP == 0 and what == "PUT" and "/group-" in key:
            job.simulation.kill(job.simulation.process)

    job.at_request = strike
    base = job.save()
    assert contents(job, base) == WHOLE
    assert len(job.outcomes) == WORLD - 3
    assert max(job.ended.values()) < 90


def test_a_rank_does_not_write_the_group_of_an_attempt_that_is_aborted_and_removed_meanwhile() -> None:
    job, listings, removed = Job(), Counter[int](), list[str]()

    def strike(who: int, what: str, key: str) -> None:
        if who == 10 and what == "PUT" and "/group-001" in key:  # another rank of the group has to write it
            job.simulation.kill(job.simulation.process)
        if who // GROUP == 1 and what == "LIST" and "/rank-" in key:
            listings[who] += 1
            if who != 10 and listings[who] == 3:  # it has seen twice that the group is overdue, and now reads
                removed.extend(each for each in job.bucket.objects if each.endswith(".manifest"))
                for each in removed:
                    job.bucket.apply_delete(each)
                at = names.parse_step_key(removed[0])
                assert at is not None
                decision = Decision(attempt=at.attempt, outcome="abort")
                job.bucket.apply_put(removed[0].rpartition("/")[0] + "/fate", encode(decision))
                job.at_request = lambda who, what, key: None

    job.at_request = strike
    base = job.save()
    assert len(removed) == WORLD
    assert not committed(job, base)
    assert not [key for key in job.bucket.objects if "/group-001" in key]
    assert job.outcomes.keys() == set(range(WORLD)) - {10}
    assert {type(outcome) for outcome in job.outcomes.values()} == {FinalError}


def test_a_rank_that_never_ends_its_part_makes_all_ranks_late_without_a_rush() -> None:
    job = Job()
    base = job.save(ranks=[rank for rank in range(WORLD) if rank != 13])
    assert not committed(job, base)
    assert {type(outcome) for outcome in job.outcomes.values()} == {LateError}
    assert "rank 13" in str(job.outcomes[10])
    assert "ranks 0 to 9 are ready" in str(job.outcomes[3])
    assert job.count(since=TIMEOUT - 1) < 4 * WORLD
    minute = job.count(since=TIMEOUT - 61) - job.count(since=TIMEOUT - 1)
    assert minute < 40 * WORLD  # one COMMIT in five seconds, and some looks


def test_a_rank_that_ended_without_a_manifest_aborts_the_attempt_for_all() -> None:
    job = Job()
    job.failed_ranks = lambda ranks: "the process of rank 13 has ended" if 13 in ranks else ""
    base = job.save(ranks=[rank for rank in range(WORLD) if rank != 13])
    assert not committed(job, base)
    assert {type(outcome) for outcome in job.outcomes.values()} == {FinalError}
    assert all("rank 13 has ended" in str(outcome) for outcome in job.outcomes.values())
    assert max(job.ended.values()) < 30


def test_ranks_of_another_plan_are_not_committed() -> None:
    job = Job()
    base = job.save(states={13: share(12)})  # this part twice, and its own never
    assert not committed(job, base)
    raised = [outcome for outcome in job.outcomes.values() if isinstance(outcome, MismatchError)]
    assert raised
    assert "do not hold what the ranks planned to save" in str(raised[0])


@pytest.mark.parametrize("other", [range(10), range(5)], ids=["another group", "the same group"])
def test_ranks_that_planned_from_other_states_are_not_committed(other: range) -> None:
    job = Job()
    base = job.save(plans=dict.fromkeys(other, b"x" * 32))
    assert not committed(job, base)
    raised = [outcome for outcome in job.outcomes.values() if isinstance(outcome, MismatchError)]
    assert raised
    assert "does not hold the same modules" in str(raised[0])


def test_a_base_that_a_collection_removes_meanwhile_aborts_the_attempt() -> None:
    job = Job()
    first = job.save(1)
    second = job.save(2)

    def removed() -> None:
        at = names.commit(RUN, first.timeline, first.step)
        job.store.put(at, encode(Commit(step=first.step, attempt=first.attempt, tombstone=True)))

    job.simulation.start(removed, at=job.simulation.now + 3.0, process=Process("collector"))
    job.outcomes.clear()
    job.own.clear()  # no rank knows its manifest of the base, so each checks that the base exists
    third = job.save(3, bases=(first,), delay=lambda rank: 10.0 if rank == 24 else 0.0)
    assert committed(job, second)
    assert not committed(job, third)
    assert {type(outcome) for outcome in job.outcomes.values()} == {FinalError}
    assert all("removed by retention" in str(each) for each in job.outcomes.values())


def test_a_newer_timeline_ends_the_save_of_all_ranks_soon() -> None:
    job = Job()
    first = job.save(1)
    job.outcomes.clear()
    began = job.simulation.now
    job.simulation.start(
        timeline.open_timeline,
        *(job.store, RUN, None, job.clock),
        at=began + 3.0,
        process=Process("another trainer"),
    )
    second = job.save(2, bases=(first,), delay=lambda rank: 100.0 if rank == 13 else 0.0)
    assert not committed(job, second)
    assert isinstance(job.outcomes[0], (ConflictError, FinalError))
    assert any(isinstance(outcome, ConflictError) for outcome in job.outcomes.values())
    assert all("taken over by timeline 2" in str(outcome) for outcome in job.outcomes.values())
    assert max(at for rank, at in job.ended.items() if rank != 13) - began < 40


def test_the_next_save_references_only_its_own_rank_of_the_base() -> None:
    job = Job()
    first = job.save(1)
    job.own.clear()  # as in new processes
    before = len(job.sent)
    second = job.save(2, bases=(first,))
    read_manifests = [
        key for _, name, what, key in job.sent[before:] if what == "GET" and f"{first.attempt}/rank" in key
    ]
    assert len(read_manifests) == WORLD
    assert not job.count(f"packs/{second.attempt}")
    assert contents(job, second) == WHOLE


def test_a_rank_that_committed_the_base_reads_at_most_its_manifest_of_it() -> None:
    job = Job()
    first = job.save(1)
    began = job.simulation.now
    second = job.save(2, bases=(first,))
    assert contents(job, second) == WHOLE
    asked = Counter((name, operation) for at, name, operation, key in job.sent if at > began and operation != "PUT")
    followers = [rank for rank in range(WORLD) if rank % GROUP]
    assert {asked[str(rank), "LIST"] for rank in followers} == {0}
    assert {asked[str(rank), "GET"] for rank in followers if rank % 2} == {1}  # COMMIT of the new step
    assert {asked[str(rank), "GET"] for rank in followers if not rank % 2} == {2}  # and the manifest of the base
    assert job.count("packs/", "PUT", since=began) == 0


def test_a_base_that_was_removed_aborts_the_next_save_only() -> None:
    job = Job()
    first = job.save(1)
    job.run(
        lambda: job.store.put(
            names.commit(RUN, first.timeline, first.step),
            encode(Commit(step=first.step, attempt=first.attempt, tombstone=True)),
        )
    )
    job.outcomes.clear()
    second = job.save(2, bases=(first,))
    assert not committed(job, second)
    assert {type(outcome) for outcome in job.outcomes.values()} == {FinalError}
    assert all("removed by retention" in str(each) for each in job.outcomes.values())
    assert not job.own
    third = job.save(3, bases=(first,))
    assert contents(job, third) == WHOLE
    found = job.run(lambda: fetch.open_step(job.store, RUN, third))
    assert {each.bases for each in found.manifests} == {()}


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": bytes(32), "data": b""},
        {"data": b"another manifest"},
        {"digest": bytes(32)},
    ],
    ids=["another digest", "other bytes", "another digest of the bytes"],
)
def test_a_manifest_that_is_not_the_one_of_its_digest_is_not_used(wrong: dict[str, bytes]) -> None:
    job = Job()
    first = job.save(1)
    for rank, own in job.own.items():
        assert own is not None
        job.own[rank] = structs.replace(own, **wrong)
    began = job.simulation.now
    second = job.save(2, bases=(first,))
    assert contents(job, second) == WHOLE
    assert job.count("packs/", "PUT", since=began) == WORLD


def test_one_process_can_commit_for_all_ranks() -> None:
    job = Job()

    def strike(who: int, what: str, key: str) -> None:
        if what == "PUT" and ("/group-" in key or "/fate" in key):
            job.simulation.kill(job.simulation.process)

    job.at_request = strike
    base = job.save()
    assert not committed(job, base)
    attempt = Attempt(RUN, 1, 1, base.attempt, WORLD)

    def alone() -> Commit:
        holder = LeaseKeeper(job.store, base.attempt, run=RUN, timeline=1, step=1, bases=(), clock=job.clock)
        with holder as held:
            return finish_alone(job.store, attempt, held)

    found = job.run(alone)
    assert found.attempt == base.attempt
    assert contents(job, base) == WHOLE
    decision = job.run(lambda: read(job.store, names.decision(RUN, 1, 1, base.attempt), Decision))
    assert decision.values() == {"rank": 0, "step": 1}
    assert job.run(alone).attempt == base.attempt


def test_collections_keep_the_packs_that_groups_name_and_remove_groups_of_removed_steps() -> None:
    job = Job()
    first = job.save(1)
    second = job.save(2, bases=(first,))
    other = {rank: (*share(rank)[:2], bytes(EACH)) for rank in range(WORLD)}
    third = job.save(3, states=other)
    before = len(job.sent)
    done = job.run(lambda: collect.retain(job.store, RUN, Keep(last=2), job.clock))
    assert [step.step for step in done.tombstones] == [1]
    assert not any(what == "GET" and ".manifest" in key for _, _, what, key in job.sent[before:])
    assert not any(first.attempt in key and "/group-" in key for key in job.bucket.objects)
    assert not any(first.attempt in key and ".manifest" in key for key in job.bucket.objects)
    assert contents(job, second) == WHOLE
    job.run(lambda: collect.retain(job.store, RUN, Keep(last=1), job.clock))
    assert not any(key.startswith(f"packs/{first.attempt}") for key in job.bucket.objects)
    assert contents(job, third) == {"w": bytes(EACH * WORLD)}


def test_a_damaged_group_is_reported_and_never_used() -> None:
    job = Job()
    base = job.save()
    key = names.group(RUN, 1, 1, base.attempt, 1)
    good = job.bucket.objects[key][0]
    for damaged in (good[:-1] + bytes([good[-1] ^ 1]), b"", good[: len(good) // 2]):
        job.bucket.apply_put(key, damaged)
        with pytest.raises(CorruptionError, match="group-001"):
            contents(job, base)
    job.bucket.apply_delete(key)
    with pytest.raises(CorruptionError, match="group-001 is missing"):
        contents(job, base)


def test_a_group_is_refused_unless_it_belongs_to_its_place_and_is_whole() -> None:
    job = Job()
    base = job.save()
    key = names.group(RUN, 1, 1, base.attempt, 1)
    good = groups.decode(job.bucket.objects[key][0], key)
    wrong = [
        structs.replace(good, index=0),
        structs.replace(good, attempt=names.new_id()),
        structs.replace(good, members=()),
        structs.replace(good, world_size=0),
        structs.replace(good, first=20),
        structs.replace(good, plan=b"short"),
    ]
    for each in wrong:
        with pytest.raises(CorruptionError):
            groups.decode(groups.encode(each), key)
    with pytest.raises(UnsupportedError, match="version 2"):
        groups.decode(groups.encode(structs.replace(good, version=2)), key)


def test_an_older_reader_refuses_a_grouped_decision_and_a_small_job_writes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job()
    base = job.save()
    key = names.decision(RUN, 1, 1, base.attempt)
    monkeypatch.setattr(Decision, "newest", 1)
    with pytest.raises(UnsupportedError, match="version 2"):
        job.run(lambda: read(job.store, key, Decision))
    assert not names.is_grouped(names.GROUP_RANKS)


def test_a_group_that_lacks_a_rank_is_not_committed() -> None:
    job = Job()

    def short(*given: object) -> groups.Group:
        found = REAL_JOIN(*given)  # type: ignore[arg-type]
        return structs.replace(found, members=found.members[:-1]) if found.index == 1 else found

    with mock.patch.object(groups, "join", short):
        base = job.save()
    assert not committed(job, base)
    assert any("does not hold the ranks of its group" in str(outcome) for outcome in job.outcomes.values())


def test_find_and_list_see_a_grouped_step_like_any_other() -> None:
    job = Job()
    base = job.save()
    assert job.run(lambda: repository.find(job.store, RUN, "latest")) == base
    assert job.run(lambda: repository.find(job.store, RUN, 1)) == base
