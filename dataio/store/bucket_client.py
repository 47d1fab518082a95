"""The client of a bucket: sends single requests in an event loop that has its own thread.

Purpose: `BucketClient` is the interface through which `bucket.BucketStore` and `ranges` use a client library. Many
threads call it, and may run their own event loop. Closing the store must close its connections. fsspec's shared loop
supports none of this.

Invariants:

* `run` returns or raises only after its coroutine has ended, so nothing writes into a caller's buffer afterwards. An
  interrupt of the calling thread cancels the coroutine.
* `close` cancels the coroutines of other threads. It waits until obstore's threads have left the interpreter, because a
  thread that is still inside it when it ends aborts the process.
* One call makes one request, which ends within a time limit, body included.

Failure behaviour: the errors of `bucket_errors`. `run` after `close`, or in a forked child, raises `UsageError`. So
does a call that `close` cancelled. A client that is garbage-collected without `close` is closed by a thread of its
own.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import os
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from datetime import datetime
from typing import Any, TypeVar, TypeVarTuple

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Buffer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Consumer = Callable[[Buffer], None]
"""Takes the next bytes of a body. The bytes are valid only during the call."""
_STOP_SECONDS = 5.0


class Head(msgspec.Struct, frozen=True):
    """An object's size in bytes, and the time of its last change."""

    size: int
    modified: datetime


class BucketClient(abc.ABC):
    """Sends requests to one bucket in its own event loop. The client connects with its first request.

    In all methods, `doing` is the start of error messages, for example `reading s3://bucket/key`.

    Args:
        url: The store's URL, for errors.
        seconds: The time limit of a request, from connecting to the last byte of the response. The size
            of a body adds to it.
        disconnect: A coroutine function that closes the connections. It must not refer to the client.
    """

    def __init__(self, url: str, seconds: float, disconnect: Callable[[], Awaitable[None]] | None = None) -> None:
        self._request_seconds = seconds
        self._thread = LoopThread("headrace-bucket", url, disconnect)
        self._closer = Finalizer(self, self._thread.stop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the client's loop and return its result."""
        return self._thread.run(work)

    def close(self) -> None:
        """Cancel the requests of other threads, and end connections, loop and thread. May be called twice."""
        self._closer()

    def reconnect(self) -> None:  # noqa: B027 - s3fs's connections are not known
        """Close the idle connections, as far as the client knows them."""

    def _seconds(self, size: int = 0) -> float:
        """The time limit of a request with a body of `size` bytes.

        Time-outs of the libraries start again with every byte, so a server that sends a byte now and then could hold a
        request forever.
        """
        return self._request_seconds + size / limits.LEAST_RATE

    @abc.abstractmethod
    async def get(self, doing: str, key: str, max_bytes: int) -> bytes:
        """Read the whole object. If it is larger than `max_bytes`, raise `CapacityError` before reading its body."""

    @abc.abstractmethod
    async def read(self, doing: str, key: str, start: int, stop: int) -> Buffer:
        """Read the bytes [start, stop) of the object; fewer if the object ends earlier.

        Raises `RangeError` if the object has no byte of the range.
        """

    @abc.abstractmethod
    async def stream(self, doing: str, key: str, start: int, stop: int, consume: Consumer) -> str | None:
        """Pass the bytes [start, stop) to `consume` as they arrive. Returns the object's ETag."""

    @abc.abstractmethod
    async def head(self, doing: str, key: str) -> Head:
        """Return the object's size and the time of its last change."""

    @abc.abstractmethod
    async def put(self, doing: str, key: str, body: memoryview, create: bool = False) -> None:
        """Write the object in one request. With `create`, raises `PreconditionError` if the object exists."""


class LoopThread:
    """A thread with an event loop. The first call of `run` starts it.

    Args:
        name: The thread's name.
        url: The store's URL, for errors.
        disconnect: A coroutine function that runs in the loop before it ends, to close connections. It must not refer
            to the store, so that the store can be garbage-collected.
    """

    def __init__(self, name: str, url: str, disconnect: Callable[[], Awaitable[None]] | None = None) -> None:
        self._name, self._url, self._disconnect = name, url, disconnect
        self._pid = os.getpid()
        self._loop: _Loop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._lock = threading.RLock()  # reentrant: a signal handler may call `stop` in the thread that holds it

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and return its result. Must not be called from the loop's own thread."""
        tasks = list[asyncio.Task[T]]()
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def start() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _pass_result(task, outcome, self._url))

        if os.getpid() != self._pid:
            work.close()
            raise self._closed_error()
        with self._lock:  # `stop` runs before this block, or after it; then it finds the task
            if self._stopped:
                work.close()
                raise self._closed_error()
            loop = self._running_loop()
            loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():  # the waiting thread was interrupted; the work may hold the caller's buffers
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                concurrent.futures.wait([outcome], timeout=_STOP_SECONDS)
            raise

    def stop(self) -> None:
        """Cancel all calls, close connections, and end the thread.

        In a forked child it does nothing, because all of these belong to the parent.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._stopped = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(loop), loop).add_done_callback(
            lambda _: loop.call_soon_threadsafe(loop.stop)
        )
        thread.join(_STOP_SECONDS)

    async def _shut_down(self, loop: _Loop) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._disconnect is not None:
            await self._disconnect()
        await loop.wait_for_callers(_STOP_SECONDS / 2)

    def _running_loop(self) -> _Loop:
        if self._loop is None:
            loop = _Loop()
            thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
            thread.start()
            self._loop, self._thread = loop, thread
        return self._loop

    def _closed_error(self) -> UsageError:
        return UsageError(
            f"the store {self._url} was closed, or opened before a fork", hint="open it again in this process"
        )


class _Loop(asyncio.SelectorEventLoop):
    """A loop that knows which threads are calling `call_soon_threadsafe`."""

    def __init__(self) -> None:
        # not epoll: a forked child shares its state, and a clean-up there would break this process's loop
        super().__init__(selectors.PollSelector())
        self._calling_threads: dict[int, None] = {}

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio. The callback may run, and the interpreter may end, before this thread has left the call."""
        thread_id = threading.get_ident()
        inside = thread_id in self._calling_threads
        self._calling_threads[thread_id] = None
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            if not inside:  # the last step, so that this thread has left when another one sees it
                del self._calling_threads[thread_id]

    async def wait_for_callers(self, seconds: float) -> None:
        """Wait until no thread is in `call_soon_threadsafe`."""
        until = self.time() + seconds
        while self._calling_threads and self.time() < until:
            await asyncio.sleep(0.001)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


def _pass_result(task: asyncio.Task[T], outcome: concurrent.futures.Future[T], url: str) -> None:
    if task.cancelled():
        outcome.set_exception(
            UsageError(
                f"the store {url} was closed while it was used", hint="close it after the last call has returned"
            )
        )
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
