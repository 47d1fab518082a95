"""Stores with deliberate faults for tests: `Faulty` draws faults from a seed, and `Late` applies writes late.

Purpose: to test code that uses a store. `Late` models a server that delays a request for minutes. In the meantime the
client tries again, or dies and is replaced. `Late` records the writes, so a test can apply an earlier one last.

Invariants: the same seed and the same calls of one thread give the same faults. `fired` counts every fault that took
place, so that a test can assert it. An operation that no rule matches is unchanged.

Failure behaviour: see `Fault`. A write that `Late` holds raises `TransientError`, like a request that timed out.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import (
    AccessDeniedError,
    AmbiguousWriteError,
    CapacityError,
    CorruptionError,
    HeadraceError,
    SlowDownError,
    TransientError,
)
from headrace.dataio.store.base import Buffer, Store, UploadLog
from headrace.dataio.store.wrappers import Wrapper

T = TypeVar("T")


class Fault(enum.Enum):
    """What happens to an operation."""

    TRANSIENT = "it fails with a temporary error, without effect"
    SLOW_DOWN = "it is refused by an overloaded store, without effect"
    LOST_ANSWER = "it takes effect, and then fails with a temporary error"
    AMBIGUOUS = "it takes effect, and reports that the outcome is unknown"
    DENIED = "it is not allowed, without effect"
    FULL = "there is no space, without effect"
    CORRUPT = "the store itself finds its bytes damaged"
    FLIP_BIT = "it succeeds, and one bit of the data is flipped"
    DELAY = "it succeeds after `seconds`"


_WITHOUT_EFFECT: dict[Fault, type[HeadraceError]] = {
    Fault.TRANSIENT: TransientError,
    Fault.SLOW_DOWN: SlowDownError,
    Fault.DENIED: AccessDeniedError,
    Fault.FULL: CapacityError,
    Fault.CORRUPT: CorruptionError,
}
_AFTER_EFFECT: dict[Fault, type[HeadraceError]] = {
    Fault.LOST_ANSWER: TransientError,
    Fault.AMBIGUOUS: AmbiguousWriteError,
}


@dataclass(slots=True)
class Rule:
    """Selects the operations that get a fault.

    Args:
        fault: The fault.
        operation: The name of the operation. Default: any.
        key: A part of the object's key. Default: any key.
        rate: The probability of the fault for each of these operations, from 0 to 1.
        times: The most faults of this rule.
        seconds: The delay of `DELAY`, or the pause that `SLOW_DOWN` asks for.
    """

    fault: Fault
    operation: str = ""
    key: str = ""
    rate: float = 1.0
    times: int = 1_000_000_000
    seconds: float = 0.0


class Faulty(Wrapper):
    """A store with faults. The first rule that matches an operation and is drawn applies.

    Args:
        inner: The store.
        rules: Which operations get which fault.
        seed: The seed of the random draws.
        clock: The clock for delays.
    """

    def __init__(self, inner: Store, rules: Sequence[Rule], *, seed: int = 0, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self.rules, self.fired = list(rules), Counter[Fault]()
        self._draw, self._clock, self._lock = random.Random(seed), clock, threading.Lock()

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        def work() -> bytes:
            return self.inner.get(key, max_bytes=max_bytes)

        rule = self._pick("get", key)
        if rule is not None and rule.fault is Fault.FLIP_BIT:
            return bytes(self._flip_bit(bytearray(work())))
        return self._with_fault(rule, "get", key, work)

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        rule = self._pick("get_into", key)
        self._with_fault(rule, "get_into", key, lambda: self.inner.get_ranges_into(key, ranges))
        filled = [buffer for _, buffer in ranges if buffer.nbytes]
        if rule is not None and rule.fault is Fault.FLIP_BIT and filled:
            self._flip_bit(filled[0])

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def open_file(self, key: str) -> int | None:
        """Return None, because reads of a local file would get no faults."""
        return None

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        return self._with_fault(self._pick(operation, key), operation, key, work)

    def _pick(self, operation: str, key: str) -> Rule | None:
        with self._lock:
            for rule in self.rules:
                if rule.times and rule.operation in ("", operation) and rule.key in key:
                    if rule.fault is Fault.FLIP_BIT and operation not in ("get", "get_into"):
                        continue
                    if self._draw.random() < rule.rate:
                        rule.times -= 1
                        self.fired[rule.fault] += 1
                        return rule
        return None

    def _with_fault(self, rule: Rule | None, operation: str, key: str, work: Callable[[], T]) -> T:
        if rule is None:
            return work()
        text = f"{operation} {key!r}: injected: {rule.fault.value}"
        if rule.fault is Fault.SLOW_DOWN:
            raise SlowDownError(text, seconds=rule.seconds or None)
        if kind := _WITHOUT_EFFECT.get(rule.fault):
            raise kind(text)
        if rule.fault is Fault.DELAY:
            self._clock.sleep(rule.seconds)
        result = work()
        if kind := _AFTER_EFFECT.get(rule.fault):
            raise kind(text)
        return result

    def _flip_bit(self, data: T) -> T:
        with self._lock:
            position = self._draw.randrange(len(data)) if len(data) else None  # type: ignore[arg-type] # bytearray or memoryview
        if position is not None:
            data[position] ^= 1  # type: ignore[index]
        return data


@dataclass(frozen=True, slots=True)
class Write:
    """One request. `data` is None for a delete. With `if_absent`, the object must not exist yet."""

    key: str
    data: bytes | None
    if_absent: bool = False


class Late(Wrapper):
    """A store that can delay writes.

    `writes` has all requests so far that change an object. `land` applies one of them, for the first time or again.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.writes: list[Write] = []
        self._hold, self._left = "", 0

    def hold(self, key: str, times: int = 1) -> None:
        """Let the next `times` writes to keys that contain `key` time out, without being applied."""
        self._hold, self._left = key, times

    @property
    def holding(self) -> int:
        """How many more writes will be held; 0 once all faults have fired."""
        return self._left

    def land(self, write: Write) -> None:
        """Apply the request now."""
        if write.data is None:
            self.inner.delete_many([write.key])
        elif write.if_absent:
            self.inner.put_if_absent(write.key, write.data)
        else:
            self.inner.put(write.key, write.data)

    def put(self, key: str, data: Buffer) -> None:
        self._record(Write(key, bytes(data)))
        super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self._record(Write(key, bytes(data), if_absent=True))
        return super().put_if_absent(key, data)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        data = b"".join(bytes(part) for part in parts)
        self._record(Write(key, data))
        return super().put_multipart(key, [data])

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self.put_multipart(key, parts)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._record(Write(key, None))
            super().delete_many([key])

    def _record(self, write: Write) -> None:
        self.writes.append(write)
        if self._left and self._hold in write.key:
            self._left -= 1
            raise TransientError(f"{write.key}: the request timed out, and is applied later")
