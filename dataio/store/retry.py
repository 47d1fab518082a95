"""Retries with exponential back-off and full jitter, limited in attempts and in time. No other module retries.

Invariants: only `TransientError` and its subclasses are retried. Retries are safe because every operation of the
contract is idempotent. This includes `AmbiguousWriteError`, because the next attempt reads the object back before it
decides. Back ends turn off the retries of their client libraries, so attempts are never multiplied.

Failure behaviour: when attempts or time are used up, the last error is raised with its own class. Its text has the
number of attempts and the seconds. `put_multipart` passes through, because its parts cannot be requested twice. A
back end that sends parts retries each one with `call`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec

from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import SlowDownError, TransientError
from headrace.dataio.core.limits import counted
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.wrappers import Wrapper

T = TypeVar("T")


class Policy(msgspec.Struct, frozen=True):
    """Limits on the attempts and their time.

    The pause before attempt n+1 is drawn uniformly from 0 to `min(longest, first * 2**(n-1))`. No attempt begins after
    `budget`, except the second one, because a single request may use the whole budget before it times out.

    Args:
        attempts: The most attempts.
        first: The longest pause after the first attempt, in seconds.
        longest: The longest pause after any attempt, in seconds.
        budget: Seconds after which no attempt begins.
    """

    attempts: int = 6
    first: float = 0.2
    longest: float = 4.0
    budget: float = 15.0

    def pause(self, tries: int, draw: float, error: TransientError | None = None) -> float:
        """Return the seconds to wait after `tries` failed attempts, the last with `error`; `draw` is in [0, 1).

        If an overloaded store (`SlowDownError`) asked for a pause, the result is that pause plus some jitter, so that
        its clients do not all return at once. If it asked for none, the pause is at least half of this attempt's
        longest one.
        """
        longest = min(self.longest, self.first * 2.0 ** (tries - 1))
        if isinstance(error, SlowDownError):
            return error.seconds + draw * longest if error.seconds is not None else longest * (1 + draw) / 2
        return draw * longest

    def again(self, tries: int, elapsed: float, pause: float) -> bool:
        """Whether another attempt may follow `tries` failed ones."""
        return tries < self.attempts and (tries == 1 or elapsed + pause <= self.budget)


def call(
    function: Callable[[], T],
    policy: Policy,
    clock: Clock = SYSTEM_CLOCK,
    draw: Callable[[], float] = random.random,
) -> T:
    """Call `function`, again on `TransientError` as `policy` allows, and return its result."""
    tries = _Tries(policy, clock, draw)
    while True:
        try:
            return function()
        except TransientError as error:
            pause = tries.failed(error)
        clock.sleep(pause)


async def call_async(
    function: Callable[[], Awaitable[T]],
    policy: Policy,
    clock: Clock = SYSTEM_CLOCK,
    draw: Callable[[], float] = random.random,
) -> T:
    """As `call`, for a coroutine function. The pauses do not block the event loop."""
    import asyncio  # slow to import, and `call` needs none of it

    tries = _Tries(policy, clock, draw)
    while True:
        try:
            return await function()
        except TransientError as error:
            pause = tries.failed(error)
        await asyncio.sleep(pause)


class _Tries:
    """The attempts of one call."""

    def __init__(self, policy: Policy, clock: Clock, draw: Callable[[], float]) -> None:
        self._policy, self._clock, self._draw = policy, clock, draw
        self._began, self._count = clock.monotonic(), 0

    def failed(self, error: TransientError) -> float:
        """Return the seconds until the next attempt. If there is none, raise `error` again with its own class."""
        self._count += 1
        elapsed = self._clock.monotonic() - self._began
        pause = self._policy.pause(self._count, self._draw(), error)
        if self._policy.again(self._count, elapsed, pause):
            return pause
        text = f"{error.message} [gave up after {counted(self._count, 'attempt')} in {elapsed:.1f} s]"
        raise type(error)(text, hint=error.hint) from error  # without the pause that the server asked for


class Retry(Wrapper):
    """Retries every operation of `inner` except `put_multipart`, as `policy` allows."""

    def __init__(self, inner: Store, policy: Policy | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self._policy, self._clock = policy or Policy(), clock

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        return work() if operation == "put_multipart" else call(work, self._policy, self._clock)

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        self._through("get_into", key, buffer.nbytes, lambda: self.inner.get_pieces(key, offset, buffer, take))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List objects. If a page fails, continue after the last key that was delivered."""
        last_key = ""
        pages = self.inner.list(prefix)

        def advance() -> ObjectInfo | None:
            nonlocal pages
            try:
                return next((info for info in pages if info.key > last_key), None)
            except TransientError:
                pages = self.inner.list(prefix)  # a generator that raised is finished
                raise

        while (info := call(advance, self._policy, self._clock)) is not None:
            last_key = info.key
            yield info

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        """List folders. If a page fails, continue after the last folder that was delivered."""
        names = self.inner.list_folders(prefix, after=after)

        def advance() -> str | None:
            nonlocal names
            try:
                return next(names, None)
            except TransientError:
                names = self.inner.list_folders(prefix, after=after)  # a generator that raised is finished
                raise

        while (name := call(advance, self._policy, self._clock)) is not None:
            after = name
            yield name
