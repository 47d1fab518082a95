"""The way to one bucket: an s3fs client with its own event loop and thread, and ranged reads into the caller's buffers.

Why an own loop: callers may run a loop of their own, come from many threads, and want connections closed when they say
so; fsspec's shared loop gives none of this.

Invariants:

* The client is used in its loop only. One call makes one request: the client's own retries are off. (aiohttp repeats an
  idempotent request if a kept connection turns out to be dead.)
* `run` returns or raises only after its coroutine has ended, so nothing writes into a caller's buffer afterwards.
* Every request ends within `S3Config.request_seconds`, body included, even if the server sends a byte now and then.
* `close` waits until obstore's threads have left the interpreter. One that is inside when the interpreter ends aborts
  the process.
* Ranges up to `GAP_BYTES` apart are fetched by one request of at most `SPAN_BYTES`; larger ranges are cut. At most
  `PARALLEL` requests are in flight for a call. All requests of a call read the same version of the object.

Failure behaviour: the errors of `s3_errors`. Use after `close`, or in a forked child, raises `UsageError`. A session
that is garbage-collected without `close` is closed by a thread of its own. A range past the end is a `RangeError` with
the object's size. A server that ignores ranges is an `UnsupportedError`. A short body, or an object replaced during the
call, is a `TransientError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import os
import re
import selectors
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from typing import Any, TypeGuard, TypeVar, TypeVarTuple

import msgspec

from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import (
    AccessDeniedError,
    HeadraceError,
    RangeError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.log import redact_loggers
from headrace.dataio.store.base import check_range, writable_bytes
from headrace.dataio.store.credential_chain import CredentialChain, Keys, botocore_session
from headrace.dataio.store.s3_config import S3Config
from headrace.dataio.store.s3_errors import translated_s3

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_STOP_SECONDS = 5.0
GAP_BYTES = 64 << 10
SPAN_BYTES = 8 << 20
PARALLEL = 8
SHORT_BYTES = 1 << 20
"""A body up to this size may arrive in one piece, in its own memory."""
_CHUNK = 256 << 10
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Range = tuple[int, memoryview]


class S3Session:
    """The way to one bucket. Making it sends no request; the first request connects."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._worker = _Worker(config)
        self._closer = Finalizer(self, self._worker.stop)

    @property
    def is_open(self) -> bool:
        """Whether the session was not closed, and not opened before a fork."""
        return self._closer.alive and self._worker.is_here()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the session's loop and return its result. Not to be called in the loop's own thread."""
        if not self.is_open:
            work.close()
            raise UsageError(
                f"the store {self.config.url} was closed, or opened before a fork", hint="open it again in this process"
            )
        return self._worker.run(work)

    async def call(self, operation: str, doing: str, **parameters: object) -> dict[str, Any]:
        """Send one request; `operation` is its name in botocore, for example `put_object`."""

        async def request() -> dict[str, Any]:
            if isinstance(body := parameters.get("Body"), io.BytesIO):
                body.seek(0)
            return await self._request(operation, doing, parameters)

        return await self._with_current_credentials(request, doing)

    async def get_range(self, doing: str, key: str, start: int, stop: int) -> memoryview | None:
        """The bytes [start, stop) in one piece, as many as exist; None if this client has no such request."""
        return None

    def reconnect(self) -> None:
        """Drop the idle connections, as far as the session knows them."""

    async def _with_current_credentials(self, request: Callable[[], Awaitable[T]], doing: str) -> T:
        """Send `request`; if the server refuses the credentials and the chain has new ones, send it once more."""
        credentials = await self._worker.credentials()
        used = credentials.generation if credentials else 0
        try:
            return await request()
        except AccessDeniedError:
            with translated_s3(self.config, doing):
                async with asyncio.timeout(self.config.request_seconds()):
                    renewed = credentials is not None and await credentials.renew(used)
                if not renewed:
                    # some servers deny a write to a missing bucket; a listing tells the two apart
                    await self._request("list_objects_v2", doing, {"MaxKeys": 1})
                    raise
        return await request()

    async def _chain_keys(self, doing: str) -> Keys | None:
        """The chain's current keys."""
        credentials = await self._worker.credentials()
        with translated_s3(self.config, doing):
            async with asyncio.timeout(self.config.request_seconds()):
                return await credentials.current() if credentials else None

    async def _request(self, operation: str, doing: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        with translated_s3(self.config, doing):
            client = await self._worker.client()
            body = parameters.get("Body")
            given = {**parameters, "Body": io.BytesIO(flat(body))} if _is_buffer(body) else parameters
            async with asyncio.timeout(self.config.request_seconds(flat(body).nbytes)):
                answer: dict[str, Any] = await getattr(client, operation)(Bucket=self.config.bucket, **given)
            return answer

    @contextlib.asynccontextmanager
    async def body(self, doing: str, **parameters: object) -> AsyncIterator[tuple[dict[str, Any], Any]]:
        """A `get_object` answer and its body. The connection is dropped unless the body was read to its end."""
        answer = await self.call("get_object", doing, **parameters)
        try:
            size = length_of(answer, f"{doing}: {self.config.endpoint}")
            with translated_s3(self.config, doing):
                async with asyncio.timeout(self.config.request_seconds(size)):
                    yield answer, answer["Body"]
        finally:
            answer["Body"].close()

    def close(self) -> None:
        """Close connections, loop and thread; may be called twice."""
        self._closer()


def length_of(answer: Mapping[str, Any], where: str) -> int:
    """The object's length, from the answer's header."""
    size = answer.get("ContentLength")
    if not isinstance(size, int):
        raise HeadraceError(f"{where} did not say how long the object is", hint="check whether this is an S3 server")
    return size


def flat(body: object) -> memoryview:
    """The bytes of a request's body, which is a buffer, a BytesIO or None."""
    view = body.getbuffer() if isinstance(body, io.BytesIO) else memoryview(body if _is_buffer(body) else b"")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _is_buffer(body: object) -> TypeGuard[bytes | bytearray | memoryview]:
    return isinstance(body, bytes | bytearray | memoryview)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that knows which threads are calling `call_soon_threadsafe`."""

    def __init__(self) -> None:
        # not epoll: a forked child shares its state, and a clean-up there would break this process's loop
        super().__init__(selectors.PollSelector())
        self._handing_over: dict[int, None] = {}

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio. The callback may run, and the interpreter end, before this thread has left the call."""
        me = threading.get_ident()
        inside = me in self._handing_over
        self._handing_over[me] = None
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            if not inside:  # the last step, so that this thread has left when another one sees it
                del self._handing_over[me]

    async def quiet(self, seconds: float) -> None:
        """Wait until no thread is in `call_soon_threadsafe`."""
        until = self.time() + seconds
        while self._handing_over and self.time() < until:
            await asyncio.sleep(0.001)


class _Worker:
    """The loop's thread and the client. It has no reference to the session, so that the session can be
    garbage-collected.
    """

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._pid = os.getpid()
        self._loop: _Loop | None = None
        self._thread: threading.Thread | None = None
        self._client: Any = None
        self._credentials: CredentialChain | None = None
        self._connecting = threading.RLock()  # reentrant: a signal handler may call `stop` in the thread that holds it
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

        with self._connecting:  # `stop` runs before this block, or after it and then finds the task
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
                    import s3fs  # with botocore and aiohttp: half a second

                    redact_loggers("botocore.auth", "botocore.endpoint", "botocore.httpsession")
                    arguments = self._config.s3fs_arguments()
                    if credentials := await self.credentials():
                        arguments["session"] = botocore_session(credentials)
                    fs = s3fs.S3FileSystem(loop=asyncio.get_running_loop(), **arguments)
                    self._client = await fs.set_session()
        return self._client

    async def credentials(self) -> CredentialChain | None:
        """The credential chain; None if the options give keys or ask for anonymous access."""
        if self._credentials is None and self._config.uses_chain:
            self._credentials = CredentialChain(self._config.profile)
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
    """The error of a request that was in flight when the store was closed."""
    return UsageError(f"the store {url} was closed while it was used", hint="close it after the last call has returned")


def _hand_over(task: asyncio.Task[T], outcome: concurrent.futures.Future[T], url: str) -> None:
    if task.cancelled():
        outcome.set_exception(closed_in_use(url))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


async def each(items: Any, work: Any, width: int) -> None:
    """Await `work(item)` for all `items`, `width` at a time. The first error cancels the others and waits for them."""
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


class Span(msgspec.Struct, frozen=True):
    """One request: the bytes [start, stop) of the object, and their targets. A target None is a gap that is dropped."""

    start: int
    stop: int
    segments: tuple[tuple[int, memoryview | None], ...]


def plan(ranges: Sequence[Range]) -> list[Span]:
    """The spans that fetch `ranges` (offset, buffer), which may be in any order and overlap."""
    spans: list[Span] = []
    for offset, buffer in sorted(_cut(ranges), key=lambda r: r[0]):
        last = spans[-1] if spans else None
        if last and last.stop <= offset <= last.stop + GAP_BYTES and offset + len(buffer) - last.start <= SPAN_BYTES:
            gap = ((offset - last.stop, None),) if offset > last.stop else ()
            spans[-1] = Span(last.start, offset + len(buffer), (*last.segments, *gap, (len(buffer), buffer)))
        else:
            spans.append(Span(offset, offset + len(buffer), ((len(buffer), buffer),)))
    return spans


def _cut(ranges: Sequence[Range]) -> Iterator[Range]:
    for offset, buffer in ranges:
        for at in range(0, len(buffer), SPAN_BYTES):
            yield offset + at, buffer[at : at + SPAN_BYTES]


async def fill(session: S3Session, key: str, name: str, ranges: Sequence[Range]) -> None:
    """Fill every buffer of `ranges` from the object `key`, called `name` in errors."""
    targets = [(offset, writable_bytes(buffer)) for offset, buffer in ranges]
    for offset, buffer in targets:
        check_range(name, offset, len(buffer))
    if any(not len(buffer) for _, buffer in targets):
        await _check_inside(session, key, name, targets)
    versions: set[str | None] = set()

    async def fetch(span: Span) -> None:
        try:
            versions.add(await _fetch(session, key, name, span))
        except RangeError:
            await _check_inside(session, key, name, targets)
            raise

    spans = plan(targets)
    if len(spans) == 1:  # most reads: no tasks, and no versions to compare
        if not await _fetch_short(session, key, name, spans[0]):
            await fetch(spans[0])
        return
    await each(spans, fetch, min(PARALLEL, len(spans)))
    if len(versions) > 1:
        raise TransientError(f"{name} was replaced while it was read", hint="read it again")


async def _check_inside(session: S3Session, key: str, name: str, ranges: Sequence[Range]) -> None:
    size = length_of(await session.call("head_object", f"reading {name}", Key=key), f"reading {name}")
    for offset, buffer in ranges:
        check_range(name, offset, len(buffer), size)


async def _fetch(session: S3Session, key: str, name: str, span: Span) -> str | None:
    wanted = f"bytes={span.start}-{span.stop - 1}"
    async with session.body(f"reading {name}", Key=key, Range=wanted) as (answer, body):
        _check_answer(answer, name, span)
        await pour(body, name, span.start, span.segments)
        version: str | None = answer.get("ETag")
        return version


async def _fetch_short(session: S3Session, key: str, name: str, span: Span) -> bool:
    """Fill a small span by one `get_range`; False if the client has none, or if the answer needs a closer look."""
    if span.stop - span.start > SHORT_BYTES:
        return False
    try:
        data = await session.get_range(f"reading {name}", key, span.start, span.stop)
    except RangeError:
        return False
    if data is None or len(data) != span.stop - span.start:
        return False
    at = 0
    for length, target in span.segments:
        if target is not None:
            target[:] = data[at : at + length]
        at += length
    return True


def _check_answer(answer: dict[str, Any], name: str, span: Span) -> None:
    status, length = answer["ResponseMetadata"]["HTTPStatusCode"], answer["ContentLength"]
    found = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    if status == 206 and found and int(found[1]) == span.start:
        if int(found[2]) + 1 == span.stop:
            return
        raise RangeError(f"{name} has only {found[3]} bytes")
    if status == 200 and span.start == 0 and length == span.stop:
        return
    raise UnsupportedError(
        f"{name}: the server answered a request for bytes {span.start} to {span.stop} with status {status} and {length} bytes",
        hint="Headrace needs a server that supports ranged reads; see `headrace doctor URL`",
    )


async def pour(body: Any, name: str, start: int, segments: Iterable[tuple[int, memoryview | None]]) -> None:
    """Fill `segments` one after the other from a body that starts at byte `start` of the object."""
    pending = memoryview(b"")
    for length, target in segments:
        done = 0
        while done < length:
            if not pending and not (pending := memoryview(await body.read(_CHUNK))):
                raise TransientError(f"{name}: the body ended at byte {start + done}", hint="check the network")
            n = min(len(pending), length - done)
            if target is not None:
                target[done : done + n] = pending[:n]
            pending, done = pending[n:], done + n
        start += length
