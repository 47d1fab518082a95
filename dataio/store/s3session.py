"""One s3fs client with its own event loop in its own thread, and a synchronous door to it.

Why an own loop: callers may run a loop of their own, come from many threads, and want the connections closed when they
say so; fsspec's shared loop gives none of this.
Invariants: the client is used in its loop only; one call makes one request (the client's own retries are off; aiohttp sends
an idempotent request once more when a kept-alive connection turns out to be dead); `run` returns or raises only after its
coroutine has ended, so nobody writes into a caller's buffer any more; `close` waits until obstore's threads, which hand their
results over, are out of the interpreter, because one that is in it when it ends aborts the process.
Every request ends within `S3Config.patience`, body included, however the server drips.
Failure behaviour: errors are those of `s3errors`. Use after `close`, or in a forked child, raises `UsageError` instead of
waiting for a thread that is not there. A session that is forgotten without `close` is closed by a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import os
import selectors
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import Context
from typing import Any, TypeGuard, TypeVar, TypeVarTuple

from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import AccessDeniedError, HeadraceError, UsageError
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3credentials import Keys, Rotating
from headrace.dataio.store.s3errors import translated_s3

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_STOP_SECONDS = 5.0


class S3Session:
    """The way to one bucket; made without a request, connected by the first."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._worker = _Worker(config)
        self._closer = Finalizer(self, self._worker.stop)

    @property
    def is_open(self) -> bool:
        """Whether it was neither closed, nor opened before a fork."""
        return self._closer.alive and self._worker.is_here()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run in the session's loop, from any thread but that loop's own."""
        if not self.is_open:
            work.close()
            raise UsageError(
                f"the store {self.config.url} was closed, or opened before a fork", hint="open it again in this process"
            )
        return self._worker.run(work)

    async def call(self, operation: str, doing: str, **parameters: object) -> dict[str, Any]:
        """One request on the bucket: `operation` is botocore's name of it, for example `put_object`."""

        async def request() -> dict[str, Any]:
            if isinstance(body := parameters.get("Body"), io.BytesIO):
                body.seek(0)
            return await self._request(operation, doing, parameters)

        return await self._allowed(request, doing)

    async def short(self, doing: str, key: str, start: int, stop: int) -> memoryview | None:
        """Bytes [start, stop) of an object in one step, as many as there are; None where there is no such way."""
        return None

    def reconnect(self) -> None:
        """Keep no connection that is idle now, as far as the session knows them."""

    def get_here(self, doing: str, key: str, most: int) -> bytes | None:
        """An object of at most `most` bytes, read in this thread; None where there is no such way, or the answer has to be looked
        at closely."""
        return None

    def read_here(self, doing: str, key: str, start: int, stop: int, buffers: Iterable[memoryview]) -> bool:
        """Fill `buffers`, one after the other, with the bytes [start, stop) of an object, all in this thread; each is asked for
        when the one before it is full. False as above: then whatever came is to be read again."""
        return False

    def head_here(self, doing: str, key: str) -> dict[str, Any] | None:
        """What `head_object` answers, in this thread; None as above."""
        return None

    async def _allowed(self, request: Callable[[], Awaitable[T]], doing: str) -> T:
        """`request`, once more with the chain's new credentials if the server refused the old ones."""
        credentials = await self._worker.credentials()
        used = credentials.generation if credentials else 0
        try:
            return await request()
        except AccessDeniedError:
            with translated_s3(self.config, doing):
                async with asyncio.timeout(self.config.patience()):
                    renewed = credentials is not None and await credentials.renew(used)
                if not renewed:
                    # some servers deny a write to a bucket that is not there; a listing tells the two apart
                    await self._request("list_objects_v2", doing, {"MaxKeys": 1})
                    raise
        return await request()

    async def _frozen(self, doing: str) -> Keys | None:
        """The chain's credentials of now."""
        credentials = await self._worker.credentials()
        with translated_s3(self.config, doing):
            async with asyncio.timeout(self.config.patience()):
                return await credentials.frozen() if credentials else None

    async def _request(self, operation: str, doing: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        with translated_s3(self.config, doing):
            client = await self._worker.client()
            body = parameters.get("Body")
            given = {**parameters, "Body": io.BytesIO(flat(body))} if _is_buffer(body) else parameters
            async with asyncio.timeout(self.config.patience(flat(body).nbytes)):
                answer: dict[str, Any] = await getattr(client, operation)(Bucket=self.config.bucket, **given)
            return answer

    @contextlib.asynccontextmanager
    async def body(self, doing: str, **parameters: object) -> AsyncIterator[tuple[dict[str, Any], Any]]:
        """A `get_object` answer and its body; the connection is dropped unless the body was read to its end."""
        answer = await self.call("get_object", doing, **parameters)
        try:
            size = length_of(answer, f"{doing}: {self.config.endpoint}")
            with translated_s3(self.config, doing):
                async with asyncio.timeout(self.config.patience(size)):
                    yield answer, answer["Body"]
        finally:
            answer["Body"].close()

    def close(self) -> None:
        """Close connections, loop and thread; may be called twice."""
        self._closer()


def length_of(answer: Mapping[str, Any], where: str) -> int:
    """How long the object is, by the answer's header."""
    size = answer.get("ContentLength")
    if not isinstance(size, int):
        raise HeadraceError(f"{where} did not say how long the object is", hint="see whether this is an S3 server")
    return size


def flat(body: object) -> memoryview:
    """The bytes of a request's body: a buffer, a BytesIO, or None."""
    view = body.getbuffer() if isinstance(body, io.BytesIO) else memoryview(body if _is_buffer(body) else b"")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _is_buffer(body: object) -> TypeGuard[bytes | bytearray | memoryview]:
    return isinstance(body, bytes | bytearray | memoryview)


class _Loop(asyncio.SelectorEventLoop):
    """Knows who is handing something over to it."""

    def __init__(self) -> None:
        # not epoll: a forked child shares its state, and cleaning up there would deafen this process's loop
        super().__init__(selectors.PollSelector())
        self._handing_over: dict[int, None] = {}

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As ever. What was handed over may be used up, and the interpreter at its end, before the thread is out of here."""
        me = threading.get_ident()
        inside = me in self._handing_over
        self._handing_over[me] = None
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            if not inside:  # no call after this, so that no other thread's turn comes before this one is out
                del self._handing_over[me]

    async def quiet(self, seconds: float) -> None:
        """Wait until everybody is out."""
        until = self.time() + seconds
        while self._handing_over and self.time() < until:
            await asyncio.sleep(0.001)


class _Worker:
    """The loop's thread and the client. Knows nothing of the session, so that the session can be collected."""

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._pid = os.getpid()
        self._loop: _Loop | None = None
        self._thread: threading.Thread | None = None
        self._client: Any = None
        self._credentials: Rotating | None = None
        self._connecting = threading.RLock()  # `stop` may come from a signal handler of the thread that holds it
        self._stopped = False
        self._client_lock: asyncio.Lock | None = None

    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        tasks = list[asyncio.Task[T]]()
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def start() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _hand_over(task, outcome, self._config.url))

        with self._connecting:  # `stop` comes before this, or after it and then finds the task
            if self._stopped:
                work.close()
                raise closed_in_use(self._config.url)
            loop = self._started()
            loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():  # the waiting thread was interrupted; the work may hold the caller's buffers
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                concurrent.futures.wait([outcome], timeout=_STOP_SECONDS)
            raise

    async def client(self) -> Any:
        if self._client is None:
            assert self._client_lock is not None
            async with self._client_lock:
                if self._client is None:
                    import s3fs  # with botocore and aiohttp, half a second: only for who needs them

                    from headrace.dataio.store import s3chain

                    arguments = self._config.s3fs_arguments()
                    if credentials := await self.credentials():
                        arguments["session"] = s3chain.session(credentials)
                    fs = s3fs.S3FileSystem(loop=asyncio.get_running_loop(), **arguments)
                    self._client = await fs.set_session()
        return self._client

    async def credentials(self) -> Rotating | None:
        """The chain's credentials; None when the options give keys or ask for none."""
        if self._credentials is None and self._config.uses_chain:
            self._credentials = Rotating(self._config.profile)
        return self._credentials

    def stop(self) -> None:
        with self._connecting:
            self._stopped = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or not self.is_here():
            return
        asyncio.run_coroutine_threadsafe(self._disconnect(), loop).add_done_callback(
            lambda _: loop.call_soon_threadsafe(loop.stop)
        )
        thread.join(_STOP_SECONDS)

    async def _disconnect(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            await asyncio.sleep(0)  # let the transports close
        if self._loop is not None:
            await self._loop.quiet(_STOP_SECONDS / 2)

    def _started(self) -> _Loop:
        if self._loop is None:
            loop = _Loop()
            self._client_lock = asyncio.Lock()
            thread = threading.Thread(target=self._serve, args=(loop,), name="headrace-s3", daemon=True)
            thread.start()
            self._loop, self._thread = loop, thread
        return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            loop.close()


def closed_in_use(url: str) -> UsageError:
    """What whoever waits for an answer gets when the store is closed."""
    return UsageError(f"the store {url} was closed while it was used", hint="close it when all is done")


def _hand_over(task: asyncio.Task[T], outcome: concurrent.futures.Future[T], url: str) -> None:
    if task.cancelled():
        outcome.set_exception(closed_in_use(url))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


async def each(items: Any, work: Any, width: int) -> None:
    """`await work(item)` for all `items`, `width` at a time; the first error cancels and awaits the others."""
    todo = iter(items)

    async def worker() -> None:
        for item in todo:
            await work(item)

    tasks = [asyncio.create_task(worker()) for _ in range(width)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
