"""Threads, queues, events and pools that wait in virtual time. They replace the real ones in chosen modules.

Purpose: `patched(simulation, module, ...)` replaces these names in the given modules for one simulation: `threading`,
`ThreadPoolExecutor`, `SimpleQueue` and `time`. Code in other modules is unchanged.

Invariants: a thread, or a thread of a pool, belongs to the process of the task that started it, and ends when that
process is killed. A pool never runs more tasks at once than its number of workers.

Failure behaviour: a name that a module does not have is skipped. Other members of `threading` are the real ones. If a
task holds a real lock while it waits for the store, no other task may take that lock.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Generic, TypeVar

from headrace.dataio.testing.simulation.scheduler import Signal, Simulation, Task

T = TypeVar("T")


@contextlib.contextmanager
def patched(simulation: Simulation, *modules: ModuleType) -> Iterator[None]:
    """Replace the names that the docstring of this file lists, in each of `modules`, until the `with` block ends."""
    stand_ins: dict[str, object] = {
        "threading": _Threading(simulation),
        "time": _Time(simulation),
        "ThreadPoolExecutor": lambda workers=None, *_args, **_named: Pool(simulation, workers or 4),
        "SimpleQueue": _queue_class(simulation),
    }
    with contextlib.ExitStack() as undo:
        for module in modules:
            for name, stand_in in stand_ins.items():
                if name in vars(module):
                    undo.callback(setattr, module, name, vars(module)[name])
                    setattr(module, name, stand_in)
        yield


class _Threading:
    """The module `threading`, with threads and events in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def Thread(self, target: Callable[..., object], args: tuple[object, ...] = (), **named: Any) -> Thread:
        return Thread(self._simulation, target, args, str(named.get("name", "thread")))

    def Event(self) -> Event:
        return Event(self._simulation)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Time:
    """The module `time`, with virtual clocks."""

    def __init__(self, simulation: Simulation) -> None:
        self.monotonic = self.perf_counter = simulation.clock.monotonic
        self.time, self.sleep = simulation.clock.time, simulation.sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Thread:
    """A `threading.Thread` in virtual time."""

    def __init__(
        self, simulation: Simulation, target: Callable[..., object], args: tuple[object, ...], name: str
    ) -> None:
        self._simulation, self._target, self._args, self.name = simulation, target, args, name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._simulation.start(self._target, *self._args, name=self.name)

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and self._simulation.task is not None:
            self._task.ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


class Event:
    """A `threading.Event` in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._signal = simulation, Signal(simulation)

    def is_set(self) -> bool:
        return self._signal.is_set

    def set(self) -> None:
        self._signal.set()

    def clear(self) -> None:
        self._signal = Signal(self._simulation)

    def wait(self, timeout: float | None = None) -> bool:
        return self._signal.wait(timeout)


def _queue_class(simulation: Simulation) -> type:
    class SimpleQueue:
        """A `queue.SimpleQueue` in virtual time."""

        def __class_getitem__(cls, _: object) -> type:
            return cls

        def __init__(self) -> None:
            self._items: deque[object] = deque()
            self._arrived = Signal(simulation)

        def put(self, item: object) -> None:
            self._items.append(item)
            self._arrived.set()

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            until = None if timeout is None else simulation.now + timeout
            while not self._items:
                remaining = None if until is None else until - simulation.now
                if not block or (remaining is not None and remaining <= 0):
                    raise queue.Empty
                self._arrived = Signal(simulation)
                self._arrived.wait(remaining)
            return self._items.popleft()

        def empty(self) -> bool:
            return not self._items

    return SimpleQueue


class Pool:
    """A `ThreadPoolExecutor` in virtual time."""

    def __init__(self, simulation: Simulation, workers: int) -> None:
        self._simulation, self._workers = simulation, workers
        self._waiting: deque[Callable[[], None]] = deque()
        self._running: list[Task] = []

    def submit(self, work: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        future = Future[T](self._simulation)
        self._waiting.append(lambda: future.fulfil(work, args, named))
        self._running = [task for task in self._running if not task.done]
        if len(self._running) < self._workers:
            self._running.append(self._simulation.start(self._drain, name="pool"))
        return future

    def map(self, work: Callable[..., T], *items: Iterable[Any]) -> Iterator[T]:
        futures = [self.submit(work, *arguments) for arguments in zip(*items, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._waiting.clear()
        for task in self._running if wait else ():
            task.ended.wait()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _drain(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


class Future(Generic[T]):
    """A `concurrent.futures.Future` in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        self._done = Signal(simulation)
        self._value: T | None = None
        self._error: BaseException | None = None

    def fulfil(self, work: Callable[..., T], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            self._value = work(*args, **named)
        except Exception as error:
            self._error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set

    def result(self, timeout: float | None = None) -> T:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set before the signal
