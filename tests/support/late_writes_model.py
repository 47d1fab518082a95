"""The commit protocol as a small machine, on a store that may apply any request late, and again: all its states are visited.

Store: every request that was ever sent stays on its way, and may be applied at any later moment, any number of times. A sender
either hears that its request was applied, or hears nothing; then it tries again, or never moves any more.
Actors: a worker, its replacement with the same plan (also while the first is only hung and goes on later), a process that
finishes the save from a node's tier, and collectors that remove the base step B and then the new step A. Leases run out at any
moment; a holder that has not renewed since stops before the decision.
With `Rules.follower`, the attempt has a second rank that follows: it takes no lease, and nothing protects the base step while
it reads it. A worker then writes a group, which names both manifests, and the decision names the group. A worker decides only
if it has found the base step after it wrote its own lease, or if no manifest needs that step.
Promise: a step that is visible has its manifests, as its decision names them, and every pack with the body that they mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Found:
    """How many states were visited, and the shortest way to one that breaks the promise, if there is one."""

    states: int
    way: list[object] | None


def search(first: S, moves: Callable[[S], Iterator[S]], broken: Callable[[S], bool]) -> Found:
    """Visit everything that can be reached, or stop at the first broken state."""
    before: dict[S, S | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if broken(state):
            way: list[object] = []
            at: S | None = state
            while at is not None:
                way.append(at)
                at = before[at]
            return Found(len(before), way[::-1])
        for after in moves(state):
            if after not in before:
                before[after] = state
                waiting.append(after)
    return Found(len(before), None)


KEYS = (
    "commit A",
    "commit B",
    "fate",
    "lease",
    "lease of tier",
    "manifest",
    "pack 0",
    "pack 1",
    "pack B",
    "gc 0",
    "gc 1",
    "manifest of the follower",
    "pack of the follower",
    "group",
)
COMMIT_A, COMMIT_B, FATE, LEASE, TIER_LEASE, MANIFEST, PACK_0, PACK_1, PACK_B, GC_0, GC_1, MANIFEST_F, PACK_F, GROUP = (
    range(len(KEYS))
)
Objects = tuple[object, ...]
"""What the store holds, by key; None for nothing."""


class Manifest(NamedTuple):
    """`pack` is a key, `body` what was in it, `references` whether the base step's pack is needed too."""

    pack: int
    body: str
    references: bool


class Group(NamedTuple):
    """The manifests of all ranks of a group."""

    manifests: tuple[object, ...]


def manifests_of(decision: object) -> tuple[object, ...]:
    """The manifests that a decision "commit" names; () for anything else."""
    if isinstance(decision, Group):
        return decision.manifests
    return (decision,) if isinstance(decision, Manifest) else ()


class Lease(NamedTuple):
    names_base: bool
    live: bool = True


class Request(NamedTuple):
    """`value` None deletes the object."""

    key: int
    value: object
    if_absent: bool = False


class Worker(NamedTuple):
    """`at` is the next thing to do; `trusts` its lease; `references` on the base step."""

    at: str = "lease"
    trusts: bool = False
    references: bool = False
    manifest: Manifest | None = None


class Follower(NamedTuple):
    """A rank that takes no lease and decides nothing."""

    at: str = "base"
    references: bool = False


class Collector(NamedTuple):
    at: str = "finish"
    fence: bool = False
    spare: bool = False
    steps_to_delete: tuple[int, ...] = ()


class World(NamedTuple):
    """`sent` may be applied at any later moment; `noted`: the first worker wrote down that its pack is stored."""

    objects: Objects
    sent: frozenset[Request]
    workers: tuple[Worker, ...]
    tier: str
    collectors: tuple[Collector, ...]
    noted: bool = False
    follower: Follower = Follower("over")


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol in one search.

    `own_packs`: a replacement worker uses separate pack names. `own_lease`: a process that sends another rank's part from a
    tier has a separate lease. `together`: while one lease of an attempt is alive, the steps that any of them names are spared.
    `conditional`: the objects that are written if absent. `follower`: a second rank takes no lease. `checks_base`: a worker
    decides only if its lease protects the bases of all manifests. `waits`: a group names all its manifests. `late`: the maximum
    number of requests that are applied late. `removes_new`: collectors remove the new step too, not only its base.
    """

    own_packs: bool = True
    own_lease: bool = True
    together: bool = True
    conditional: frozenset[int] = frozenset({MANIFEST, FATE, COMMIT_A, GC_0, GC_1, MANIFEST_F, GROUP})
    workers: int = 2
    tier: bool = False
    follower: bool = False
    checks_base: bool = True
    waits: bool = True
    collectors: int = 1
    removes_new: bool = True
    late: int = 1


def begin(rules: Rules) -> World:
    objects: list[object] = [None] * len(KEYS)
    objects[COMMIT_B], objects[PACK_B] = "B", "base"
    tier = "lease" if rules.tier else "over"
    workers, collectors = (Worker(),) * rules.workers, (Collector(),) * rules.collectors
    follower = Follower() if rules.follower else Follower("over")
    return World(tuple(objects), frozenset(), workers, tier, collectors, follower=follower)


def applied(objects: Objects, request: Request) -> Objects:
    """The request reaches the store."""
    key, value, if_absent = request
    if if_absent and objects[key] is not None:
        return objects
    return (*objects[:key], value, *objects[key + 1 :])


def broken(world: World) -> bool:
    """Whether a visible step lacks something."""
    objects = world.objects
    if objects[COMMIT_B] == "B" and objects[PACK_B] is None:
        return True
    commit, decision = objects[COMMIT_A], objects[FATE]
    manifests = manifests_of(decision)
    if commit == "tombstone" or (commit is None and not manifests):
        return False
    if isinstance(decision, Group) and objects[GROUP] != decision:
        return True
    return not manifests or any(
        _is_lost(objects, key, each) for key, each in zip((MANIFEST, MANIFEST_F), manifests, strict=False)
    )


def _is_lost(objects: Objects, key: int, manifest: object) -> bool:
    if not isinstance(manifest, Manifest) or objects[key] != manifest or objects[manifest.pack] != manifest.body:
        return True
    return manifest.references and objects[PACK_B] is None


class Machine:
    """All moves from a state, under some rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def moves(self, world: World) -> Iterator[World]:
        for request in world.sent:
            yield world._replace(objects=applied(world.objects, request))
        yield self._time_passes(world)
        for i, worker in enumerate(world.workers):
            yield from self._worker(world, i, worker)
        yield from self._tier(world)
        for i, collector in enumerate(world.collectors):
            yield from self._collector(world, i, collector)
        yield from self._follower(world)
        if manifests_of(world.objects[FATE]) and world.objects[COMMIT_A] is None:  # a reader helps
            yield from self._send(world, world, (COMMIT_A, "A"))

    def _time_passes(self, world: World) -> World:
        """All leases run out; their holders have stopped to trust them before."""
        objects = tuple(value._replace(live=False) if isinstance(value, Lease) else value for value in world.objects)
        return world._replace(objects=objects, workers=tuple(w._replace(trusts=False) for w in world.workers))

    def _send(self, world: World, after: World, *wanted: tuple[int, object]) -> Iterator[World]:
        """The requests are applied, and the sender goes on to `after`; one may stay on its way as well. Or one times out: it
        stays on its way, and the sender does not go on."""
        requests = [Request(key, value, value is not None and key in self.rules.conditional) for key, value in wanted]
        objects = world.objects
        for request in requests:
            objects = applied(objects, request)
        yield after._replace(objects=objects)
        if len(world.sent) < self.rules.late:
            for request in requests:
                sent = world.sent | {request}
                yield world._replace(sent=sent)
                yield after._replace(objects=objects, sent=sent)

    def _worker(self, world: World, i: int, worker: Worker) -> Iterator[World]:
        def then(**changes: object) -> World:
            changed = worker._replace(**changes)  # type: ignore[arg-type]
            return world._replace(workers=(*world.workers[:i], changed, *world.workers[i + 1 :]))

        objects, body = world.objects, f"by worker {i}"
        if worker.at == "lease":
            yield from self._send(world, then(at="base", trusts=True), (LEASE, Lease(True)))
        elif worker.at == "base":
            going = objects[GC_0] is not None or objects[GC_1] is not None
            yield then(at="pack", references=objects[COMMIT_B] == "B" and not going)
        elif worker.at == "pack":
            if i > 0 and world.noted and objects[PACK_0] is not None:  # as its predecessor wrote down
                yield then(at="manifest", manifest=Manifest(PACK_0, "by worker 0", worker.references))
            pack = PACK_1 if i > 0 and self.rules.own_packs else PACK_0
            after = then(at="manifest", manifest=Manifest(pack, body, worker.references))
            yield from self._send(world, after._replace(noted=world.noted or i == 0), (pack, body))
        elif worker.at == "manifest":
            yield from self._send(world, then(at="decide"), (MANIFEST, worker.manifest))
        elif worker.at == "decide" and objects[FATE] is not None:
            yield then(at="commit" if manifests_of(objects[FATE]) else "over")
        elif worker.at == "decide" and self.rules.follower:
            yield from self._group(world, worker)
        elif worker.at == "decide" and worker.trusts and objects[MANIFEST] is not None:
            yield from self._send(world, then(at="decide"), (FATE, objects[MANIFEST]))
        elif worker.at == "commit":
            yield from self._send(world, then(at="release"), (COMMIT_A, "A"))
        elif worker.at == "release":
            yield from self._send(world, then(at="over"), (LEASE, None))
        if worker.at in ("pack", "manifest", "decide") and not worker.trusts:
            yield from self._send(world, then(trusts=True), (LEASE, Lease(True)))

    def _group(self, world: World, worker: Worker) -> Iterator[World]:
        """Write the group, or the decision that names it."""
        objects, group = world.objects, world.objects[GROUP]
        if group is None:
            manifests = (objects[MANIFEST], objects[MANIFEST_F])
            if None not in manifests or (not self.rules.waits and objects[MANIFEST] is not None):
                yield from self._send(world, world, (GROUP, Group(manifests)))
        elif worker.trusts:
            needs_base = any(isinstance(each, Manifest) and each.references for each in manifests_of(group))
            sound = worker.references or not needs_base or not self.rules.checks_base
            yield from self._send(world, world, (FATE, group if sound else "abort"))

    def _follower(self, world: World) -> Iterator[World]:
        follower = world.follower

        def then(**changes: object) -> World:
            return world._replace(follower=follower._replace(**changes))  # type: ignore[arg-type]

        if follower.at == "base":
            yield then(at="pack", references=False)
            if world.objects[COMMIT_B] == "B":
                yield then(at="pack", references=True)
        elif follower.at == "pack":
            yield from self._send(world, then(at="manifest"), (PACK_F, "by the follower"))
        elif follower.at == "manifest":
            manifest = Manifest(PACK_F, "by the follower", follower.references)
            yield from self._send(world, then(at="over"), (MANIFEST_F, manifest))

    def _tier(self, world: World) -> Iterator[World]:
        """Another rank's part of the attempt, which leans on nothing, is sent by another process, under a lease."""
        if world.tier == "lease":
            found = world.objects[LEASE]
            yield world._replace(tier="with" if isinstance(found, Lease) and found.names_base else "without")
        elif world.tier != "over":
            lease = TIER_LEASE if self.rules.own_lease else LEASE
            yield from self._send(world, world._replace(tier="over"), (lease, Lease(world.tier == "with")))

    def _collector(self, world: World, i: int, collector: Collector) -> Iterator[World]:
        def then(at: str, **changes: object) -> World:
            changed = collector._replace(at=at, **changes)  # type: ignore[arg-type]
            return world._replace(collectors=(*world.collectors[:i], changed, *world.collectors[i + 1 :]))

        objects = world.objects
        decision, commit = objects[FATE], objects[COMMIT_A]
        if collector.at == "finish":
            complete = bool(manifests_of(decision)) and commit is None
            yield from self._send(world, then("record"), *([(COMMIT_A, "A")] if complete else []))
        elif collector.at == "record":
            yield from self._send(world, then("leases"), (GC_0 + i, "record"))
        elif collector.at == "leases":
            leases = [lease for lease in objects if isinstance(lease, Lease)]
            alive = any(lease.live for lease in leases)
            listed = bool(leases) or objects[MANIFEST] is not None or objects[MANIFEST_F] is not None
            fence = decision is None and listed and not alive
            named = [lease for lease in leases if lease.live or self.rules.together]
            yield then("fence", fence=fence, spare=alive and any(lease.names_base for lease in named))
        elif collector.at == "fence":
            yield from self._send(world, then("bury B"), *([(FATE, "abort")] if collector.fence else []))
        elif collector.at == "bury B":
            bury = not collector.spare and objects[COMMIT_B] == "B"
            yield from self._send(world, then("bury A"), *([(COMMIT_B, "tombstone")] if bury else []))
        elif collector.at == "bury A":
            bury = self.rules.removes_new and commit == "A"
            yield from self._send(world, then("look"), *([(COMMIT_A, "tombstone")] if bury else []))
        elif collector.at == "look":
            yield then("delete", steps_to_delete=tuple(self._garbage(objects)))
        elif collector.at == "delete":
            yield from self._send(
                world, then("settle", steps_to_delete=()), *((key, None) for key in collector.steps_to_delete)
            )
        elif collector.at == "settle":
            yield from self._send(world, then("over"), (GC_0 + i, None))

    def _garbage(self, objects: Objects) -> Iterator[int]:
        decision, commit = objects[FATE], objects[COMMIT_A]
        dead = decision == "abort" or (decision is not None and commit == "tombstone")
        manifests = [
            each for each in (objects[MANIFEST], objects[MANIFEST_F]) if isinstance(each, Manifest) and not dead
        ]
        for pack in (PACK_0, PACK_1, PACK_F):
            if decision is not None and objects[pack] is not None and not any(each.pack == pack for each in manifests):
                yield pack
        if dead:
            yield from (MANIFEST, *((MANIFEST_F, GROUP) if self.rules.follower else ()))
            if commit == "tombstone":
                yield FATE
        if objects[COMMIT_B] == "tombstone" and not any(each.references for each in manifests):
            yield PACK_B


def explore(rules: Rules) -> Found:
    machine = Machine(rules)
    return search(begin(rules), machine.moves, broken)
