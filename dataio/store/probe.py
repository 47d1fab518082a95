"""Checks whether a store enforces preconditions. The check runs once per repository, before several writers share it.

Invariants: the probe tests the server's behaviour, not its claims. It violates a precondition on purpose. If the server
accepts the violation, preconditions are unsupported. The probe writes small objects with random names below `prefix`,
and deletes them.

Failure behaviour: `probe_preconditions` returns the result, and raises only if the store cannot be used at all.
`require_preconditions` raises `UnsupportedError` with the reason and the next step. A sequential probe cannot prove
atomicity; `certify` tests it with many writers at once.
"""

from __future__ import annotations

import concurrent.futures
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.store.base import Store

_HINT = (
    "give one writer its own repository, or use a store that supports If-None-Match (check with `headrace doctor URL`)"
)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether `put_if_absent` works. If not, `reason` explains why."""

    supported: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Race:
    """One race: how many writers won by their own report, and whether the object is one of theirs."""

    winners: int
    holds_a_winner: bool

    @property
    def fair(self) -> bool:
        return self.winners == 1 and self.holds_a_winner


def probe_preconditions(store: Store, prefix: str = "") -> ProbeResult:
    """Write one key twice, conditionally, with different bodies. If both succeed, the store ignores preconditions."""
    with _scratch(store, prefix) as key:
        try:
            first_accepted = store.put_if_absent(key, _body())
            second_accepted = store.put_if_absent(key, _body())
        except UnsupportedError as error:
            return ProbeResult(False, f"the store refuses conditional writes: {error.message}")
        if not first_accepted:
            return ProbeResult(False, "a conditional write to a new key was refused")
        if second_accepted:
            return ProbeResult(
                False, "a conditional write to a key that exists was accepted: the precondition is ignored"
            )
        return ProbeResult(True)


def require_preconditions(store: Store, prefix: str = "") -> None:
    """Raise `UnsupportedError` unless the store enforces preconditions."""
    result = probe_preconditions(store, prefix)
    if not result.supported:
        raise UnsupportedError(f"{store.location.url} cannot be shared by writers: {result.reason}", hint=_HINT)


def certify(store: Store, prefix: str, writers: int, rounds: int) -> Iterator[Race]:
    """Let `writers` threads race for one key, `rounds` times. Each round has its own key."""
    with concurrent.futures.ThreadPoolExecutor(writers) as pool:
        for _ in range(rounds):
            with _scratch(store, prefix) as key:
                yield _race(store, key, writers, pool)


def _race(store: Store, key: str, writers: int, pool: concurrent.futures.Executor) -> Race:
    bodies, barrier = [_body() for _ in range(writers)], threading.Barrier(writers)

    def write(body: bytes) -> bool:
        barrier.wait(timeout=60)
        return store.put_if_absent(key, body)

    outcomes = list(pool.map(write, bodies))
    stored = store.get(key)
    return Race(sum(outcomes), any(success and body == stored for success, body in zip(outcomes, bodies, strict=True)))


@contextmanager
def _scratch(store: Store, prefix: str) -> Iterator[str]:
    base = prefix.strip("/") + "/" if prefix.strip("/") else ""
    key = f"{base}headrace-probe-{uuid.uuid4().hex}"
    try:
        yield key
    finally:
        store.delete_many([key])


def _body() -> bytes:
    return b"headrace probe " + uuid.uuid4().hex.encode()
