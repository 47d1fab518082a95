"""Tags as a small machine, on a store that may apply a request late, and again: all its states are visited.

Actors: processes that move one tag between two steps, or remove it, and collectors whose policy keeps the tagged step alone.
Promise: the tag names a step that is there, and no other than the last operation that was reported as done has given it, or one
that has begun since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.support.late_writes_model import Found, search

REMOVED = 0
"""In the place of a step: the tag is removed."""


class Record(NamedTuple):
    """What the tag is; `by` tells equal records of two processes apart."""

    step: int
    by: int


class Request(NamedTuple):
    """`what` is a kind of object and its number; `value` None deletes it."""

    what: tuple[str, int]
    value: object
    if_absent: bool = False


class Mover(NamedTuple):
    """`number` is its record's; `since`: what others have written since it looked."""

    step: int
    at: str = "lease"
    trusts: bool = False
    number: int = 0
    since: frozenset[int] = frozenset()


class Collector(NamedTuple):
    at: str = "condemn"
    steps_to_delete: tuple[int, ...] = ()


class World(NamedTuple):
    """`objects`: records, leases ((step, live) by mover), collectors' records, tombstones. `allowed`: what the tag may be."""

    objects: frozenset[tuple[tuple[str, int], object]]
    sent: frozenset[Request]
    movers: tuple[Mover, ...]
    collectors: tuple[Collector, ...]
    allowed: frozenset[int]


@dataclass(frozen=True)
class Rules:
    """What is tried. `numbered`: each move writes a record of its own, else all overwrite one. `all_protect`: collectors keep the
    steps of older records too, which a move deletes once it is sure of its own. `steps`: what each mover wants."""

    numbered: bool = True
    all_protect: bool = True
    steps: tuple[int, ...] = (3, 2)
    collectors: int = 1
    late: int = 1


def records(objects: dict[tuple[str, int], object]) -> list[tuple[int, int]]:
    """(number, step), newest first, down to the last removal."""
    found = []
    for (kind, number), value in sorted(objects.items(), reverse=True):
        if kind == "tag" and isinstance(value, Record):
            if value.step == REMOVED:
                break
            found.append((number, value.step))
    return found


def named(objects: dict[tuple[str, int], object]) -> int:
    """The step that the tag names: that of the newest record whose step is there."""
    there = (step for _, step in records(objects) if ("tombstone", step) not in objects)
    return next(there, REMOVED)


def broken(world: World) -> bool:
    return named(dict(world.objects)) not in world.allowed


def applied(objects: dict[tuple[str, int], object], request: Request) -> dict[tuple[str, int], object]:
    after = dict(objects)
    if request.value is None:
        after.pop(request.what, None)
    elif not (request.if_absent and request.what in objects):
        after[request.what] = request.value
    return after


class Machine:
    """All moves from a state, under some rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def moves(self, world: World) -> Iterator[World]:
        objects = dict(world.objects)
        for request in world.sent:
            yield world._replace(objects=frozenset(applied(objects, request).items()))
        yield self._time_passes(world)
        for i, mover in enumerate(world.movers):
            yield from self._mover(world, objects, i, mover)
        for i, collector in enumerate(world.collectors):
            yield from self._collector(world, objects, i, collector)

    def _time_passes(self, world: World) -> World:
        over = {(what, (value[0], False) if what[0] == "lease" else value) for what, value in world.objects}  # type: ignore[index]
        movers = tuple(mover._replace(trusts=False) for mover in world.movers)
        return world._replace(objects=frozenset(over), movers=movers)

    def _send(self, world: World, after: World, *requests: Request) -> Iterator[World]:
        objects = dict(world.objects)
        for request in requests:
            objects = applied(objects, request)
        yield after._replace(objects=frozenset(objects.items()))
        if len(world.sent) < self.rules.late:
            for request in requests:
                sent = world.sent | {request}
                yield world._replace(sent=sent)
                yield after._replace(objects=frozenset(objects.items()), sent=sent)

    def _mover(self, world: World, objects: dict[tuple[str, int], object], i: int, mover: Mover) -> Iterator[World]:
        def then(**changes: object) -> World:
            changed = mover._replace(**changes)  # type: ignore[arg-type]
            return world._replace(movers=(*world.movers[:i], changed, *world.movers[i + 1 :]))

        if mover.at == "lease" and mover.step == REMOVED:
            yield then(at="list", trusts=True)
        elif mover.at == "lease":
            yield from self._send(world, then(at="there", trusts=True), Request(("lease", i), (mover.step, True)))
        elif mover.at == "there":
            going = any(kind == "gc" and mover.step in value for (kind, _), value in objects.items())  # type: ignore[operator]
            yield then(at="over" if going or ("tombstone", mover.step) in objects else "list")
        elif mover.at == "list":
            newest = max((number for kind, number in objects if kind == "tag"), default=-1)
            yield then(at="write", number=newest + 1 if self.rules.numbered else 0, since=frozenset())
        elif mover.at == "write":
            yield from self._write(world, objects, i, mover)
        elif mover.at == "check":
            if mover.trusts or mover.step == REMOVED:
                yield self._done(world, i, mover)
            else:
                yield then(at="over")
        elif mover.at == "clean":
            older = [Request(what, None) for what in sorted(objects) if what[0] == "tag" and what[1] < mover.number]
            yield from self._send(world, then(at="release"), *older)
        elif mover.at == "release":
            yield from self._send(world, then(at="over"), Request(("lease", i), None))

    def _write(self, world: World, objects: dict[tuple[str, int], object], i: int, mover: Mover) -> Iterator[World]:
        what, record = ("tag", mover.number), Record(mover.step, i)
        if self.rules.numbered and objects.get(what, record) != record:
            yield world._replace(movers=(*world.movers[:i], mover._replace(at="list"), *world.movers[i + 1 :]))
            return
        movers = [
            other._replace(since=other.since | {mover.step}) if other.at in ("write", "check") else other
            for other in world.movers
        ]
        begun = world._replace(movers=(*movers[:i], mover, *movers[i + 1 :]), allowed=world.allowed | {mover.step})
        after = begun._replace(movers=(*movers[:i], mover._replace(at="check"), *movers[i + 1 :]))
        yield from self._send(begun, after, Request(what, record, self.rules.numbered))

    def _done(self, world: World, i: int, mover: Mover) -> World:
        """It is reported as done: from now on the tag is this, or what others do at the same time."""
        at_work = {other.step for other in world.movers if other.at in ("write", "check")}
        movers = (*world.movers[:i], mover._replace(at="clean"), *world.movers[i + 1 :])
        return world._replace(movers=movers, allowed=frozenset({mover.step, *mover.since, *at_work}))

    def _kept(self, objects: dict[tuple[str, int], object]) -> set[int]:
        if self.rules.all_protect:
            return {step for _, step in records(objects)}
        return {named(objects)}

    def _collector(
        self, world: World, objects: dict[tuple[str, int], object], i: int, collector: Collector
    ) -> Iterator[World]:
        def then(at: str, steps_to_delete: tuple[int, ...] = collector.steps_to_delete) -> World:
            changed = Collector(at, steps_to_delete)
            return world._replace(collectors=(*world.collectors[:i], changed, *world.collectors[i + 1 :]))

        if collector.at == "condemn":
            there = [step for step in (2, 3) if ("tombstone", step) not in objects]
            yield then("record", tuple(step for step in there if step not in self._kept(objects)))
        elif collector.at == "record":
            yield from self._send(world, then("leases"), Request(("gc", i), collector.steps_to_delete, True))
        elif collector.at == "leases":
            leased = {value[0] for (kind, _), value in objects.items() if kind == "lease" and value[1]}  # type: ignore[index]
            yield then("tags", tuple(step for step in collector.steps_to_delete if step not in leased))
        elif collector.at == "tags":
            kept = self._kept(objects)
            yield then("bury", tuple(step for step in collector.steps_to_delete if step not in kept))
        elif collector.at == "bury":
            tombstones = [Request(("tombstone", step), True) for step in collector.steps_to_delete]
            yield from self._send(world, then("settle"), *tombstones)
        elif collector.at == "settle":
            yield from self._send(world, then("over"), Request(("gc", i), None))


def explore(rules: Rules) -> Found:
    objects = frozenset({(("tag", 0), Record(2, -1))})
    movers = tuple(Mover(step) for step in rules.steps)
    first = World(objects, frozenset(), movers, (Collector(),) * rules.collectors, frozenset({2}))
    return search(first, Machine(rules).moves, broken)
