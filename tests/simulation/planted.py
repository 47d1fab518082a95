"""Faults that are planted in the real protocol, one at a time: random histories must find each of them.

Each entry of `PLANTED` has a description of the fault, and a context manager that plants it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from msgspec import structs

from headrace.checkpoint.format import group, names, own_digest
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Decision, Document, encode
from headrace.checkpoint.repository import collect, commit, inventory, pack_users, retention, timeline
from headrace.checkpoint.repository import lease as leases
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.testing.simulation.store import SimulatedStore

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


def overwritten(kind: str) -> Plant:
    """Objects of this kind are written although they exist."""
    real = SimulatedStore.put_if_absent

    def put_if_absent(store: SimulatedStore, key: str, data: bytes) -> bool:
        parsed = names.parse_step_key(key)
        if parsed is None or parsed.kind != kind:
            return real(store, key, data)
        store.put(key, data)
        return True

    return lambda: mock.patch.object(SimulatedStore, "put_if_absent", put_if_absent)


@contextlib.contextmanager
def lease_without_bases() -> Iterator[None]:
    def encoded(document: Document) -> bytes:
        return encode(structs.replace(document, bases=()))

    with mock.patch.object(leases, "encode", encoded):
        yield


@contextlib.contextmanager
def judged_by_commit() -> Iterator[None]:
    def is_dead(seen: inventory.Inventory, attempt: inventory.SeenAttempt) -> bool:
        found = seen.commits.get(attempt.step)
        return found is None or found.tombstone or found.attempt != attempt.attempt

    with mock.patch.object(retention, "is_dead", is_dead):
        yield


@contextlib.contextmanager
def removed_without_abort() -> Iterator[None]:
    real = retention.garbage

    def garbage(seen: inventory.Inventory, packs_of: Any, now: float) -> Any:
        for attempt in retention.to_fence(seen, now):
            seen.attempts[attempt.attempt] = replace(
                attempt, decision=Decision(attempt=attempt.attempt, outcome="abort")
            )
        return real(seen, packs_of, now)

    with mock.patch.object(retention, "garbage", garbage), mock.patch.object(collect, "_fence", fence):
        yield


def fence(_: Any, seen: inventory.Inventory, wanted: Any, now: float) -> Any:
    """As collectors do it, but nothing is aborted."""
    return (), retention.spared(seen, wanted, now)


@contextlib.contextmanager
def commit_deleted() -> Iterator[None]:
    def bury(store: Any, steps: Any, clock: Any, until: float) -> Iterator[Any]:
        for step in sorted(steps, key=retention.order):
            store.delete_many([names.commit(step.run, step.timeline, step.step)])
            yield step

    with mock.patch.object(collect, "_write_tombstones", bury):
        yield


@contextlib.contextmanager
def some_manifests() -> Iterator[None]:
    def sound(store: Any, attempt: commit.Attempt) -> tuple[list[bytes], None]:
        found = []
        for rank in range(attempt.world_size):
            with contextlib.suppress(HeadraceError):
                found.append(digest(store.get(attempt.manifest_key(rank), max_bytes=manifests.MAX_BYTES)))
        return found, None

    real = commit.decide

    def decide(attempt: commit.Attempt, view: commit.View) -> commit.Action:
        found = real(attempt, view)
        return commit.WriteDecision() if isinstance(found, commit.Wait) and view.manifests else found

    with mock.patch.object(commit, "_checked_manifests", sound), mock.patch.object(commit, "decide", decide):
        yield


@contextlib.contextmanager
def commit_first() -> Iterator[None]:
    real = commit.write_decision

    def write(store: Any, attempt: commit.Attempt, lease: LeaseKeeper) -> None:
        commit.write_commit(store, attempt)
        real(store, attempt, lease)

    with mock.patch.object(commit, "write_decision", write):
        yield


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    def fetch(store: Any, key: str, *, max_bytes: int) -> bytes:
        return bytes(store.get(key, max_bytes=max_bytes))

    with mock.patch.object(own_digest, "fetch", fetch), mock.patch.object(own_digest, "check", return_value=None):
        yield


@contextlib.contextmanager
def kept_while_undecided() -> Iterator[None]:
    real = pack_users.PackUsers.look

    def look(users: pack_users.PackUsers, seen: inventory.Inventory, live: Any) -> Any:
        users._decided = {attempt.attempt for attempt in live}
        return real(users, seen, live)

    with mock.patch.object(pack_users.PackUsers, "look", look):
        yield


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """An attempt that a collection aborts is not read again, either."""

    def is_settled(step: inventory.SeenStep) -> bool:
        return step.commit is not None or bool(step.attempts)

    def changed(reader: inventory.Reader, steps: Any) -> None:
        real(reader, [at for at in steps if at in reader._settled and reader._settled[at].commit])

    real = inventory.Reader.changed
    with (
        mock.patch.object(inventory.SeenStep, "is_settled", property(is_settled)),
        mock.patch.object(inventory.Reader, "changed", changed),
    ):
        yield


def replaced(where: object, name: str, by: object) -> Plant:
    return lambda: mock.patch.object(where, name, by)


@contextlib.contextmanager
def metadata_of_the_last_rank() -> Iterator[None]:
    add = group.Tally.add

    def added(tally: group.Tally, counted: group.Group | manifests.Manifest) -> None:
        add(tally, counted)
        tally.metadata = counted.metadata

    with mock.patch.object(group.Tally, "add", added):
        yield


PLANTED: dict[str, Plant] = {
    "collectors remove attempts whose lease is over without aborting them": removed_without_abort,
    "a replaced worker uses its predecessor's pack names": replaced(
        names, "pack_name", lambda rank, worker, number: f"{rank}-00000000-{number}"
    ),
    "a manifest is overwritten": overwritten("manifest"),
    "a decision is overwritten": overwritten("fate"),
    "a COMMIT is overwritten": overwritten("commit"),
    "collectors ignore leases": replaced(retention, "spared", lambda *_: set()),
    "readers and savers ignore pending deletes": replaced(repository, "pending_deletes", lambda *_: set()),
    "collectors judge an attempt by COMMIT": judged_by_commit,
    "collectors delete COMMIT instead of replacing it": commit_deleted,
    "savers ignore a newer timeline": replaced(timeline, "newest_after", lambda *_: None),
    "the decision does not wait for all manifests": some_manifests,
    "COMMIT is written before the decision": commit_first,
    "leases name no bases": lease_without_bases,
    "the own digest of a manifest is not compared": unchecked,
    "the packs of an attempt without a decision are read once": kept_while_undecided,
    "collectors read a step once, although it has no outcome": read_once,
    "collectors do not read the packs of attempts that reference others": replaced(
        pack_users.PackUsers, "_others", lambda *_: ()
    ),
    "the decision has the metadata of the last rank": metadata_of_the_last_rank,
}
