"""The operations that all bucket stores share: reads, single writes and conditional writes, through a `BucketClient`.

Purpose: a back end for a kind of bucket needs a `BucketClient`, and a subclass of `BucketStore` that adds multipart
writes, listings and deletes.

Invariants:

* `put_if_absent` is one single PUT, never a multipart upload. If its outcome is unknown (a refusal, a time-out, a lost
  response, a 5xx), the store reads the object back.
* Nothing is cached: no listing, no size. `retry.Retry` does the retries.

Failure behaviour: the errors of `bucket_errors`. A PUT above `PUT_BYTES`, or a conditional one above
`base.CONDITIONAL_BYTES`, is a `CapacityError`. If the outcome of a conditional write stays unknown, it raises an
`AmbiguousWriteError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AmbiguousWriteError,
    CapacityError,
    HeadraceError,
    NotFoundError,
    TransientError,
    UsageError,
)
from headrace.dataio.store.base import Buffer, ObjectInfo, Store, check_conditional_size, check_key, writable_bytes
from headrace.dataio.store.bucket_client import BucketClient, Head
from headrace.dataio.store.bucket_errors import PreconditionError, UnreachableError
from headrace.dataio.store.ranges import SPAN_BYTES, read_pieces, read_ranges

PUT_BYTES = 5 * limits.GIB
"""The largest body of one PUT."""


class BucketConfig(Protocol):
    """Where the objects are."""

    @property
    def url(self) -> str: ...

    def full_key(self, key: str) -> str:
        """The key in the bucket: the prefix and the store's key."""


class BucketStore(Store):
    """Objects under a prefix of a bucket.

    Args:
        config: Where the objects are.
        client: Sends the requests. The store closes it.
    """

    def __init__(self, config: BucketConfig, client: BucketClient) -> None:
        self._config, self._client = config, client

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        client = self._client
        return client.run(client.get(f"reading {self._name(key)}", self._config.full_key(key), max_bytes))

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        read_ranges(self._client, self._config.full_key(key), self._name(key), [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        read_ranges(self._client, self._config.full_key(key), self._name(key), ranges)

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        if 0 < buffer.nbytes <= SPAN_BYTES:
            full, name = self._config.full_key(key), self._name(key)
            read_pieces(self._client, full, name, offset, writable_bytes(buffer), take)
        else:
            super().get_pieces(key, offset, buffer, take)

    def put(self, key: str, data: Buffer) -> None:
        self._client.run(self._put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        check_conditional_size(self._name(key), data)
        try:
            self._client.run(self._put(key, data, create=True))
            return True
        except UnreachableError:
            raise
        except (PreconditionError, TransientError) as error:
            return self._holds_own_body(key, data, error)

    def stat(self, key: str) -> ObjectInfo:
        head = self._client.run(self._client.head(f"reading {self._name(key)}", self._config.full_key(key)))
        return ObjectInfo(key, head.size, head.modified.timestamp())

    def reconnect(self) -> None:
        self._client.reconnect()

    def close(self) -> None:
        self._client.close()

    def _name(self, key: str) -> str:
        return f"{self._config.url}/{key}"

    async def _put(self, key: str, data: Buffer, create: bool = False) -> None:
        body = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        if len(body) > PUT_BYTES:
            raise CapacityError(
                f"{self._name(key)}: one PUT takes at most {limits.format_bytes(PUT_BYTES)}, not "
                f"{limits.format_bytes(len(body))}",
                hint="use put_multipart",
            )
        await self._client.put(f"writing {self._name(key)}", self._config.full_key(key), body, create)

    def _holds_own_body(self, key: str, data: Buffer, cause: HeadraceError) -> bool:
        """Whether the object has this writer's body, after a PUT with an unknown outcome."""
        body = bytes(data)
        try:
            return self.get(key, max_bytes=len(body)) == body
        except CapacityError:  # longer than this writer's body
            return False
        except (NotFoundError, TransientError) as error:
            raise AmbiguousWriteError(
                f"could not tell whether {self._name(key)} was written: {cause.message}; and reading it back: {error.message}",
                hint="try again; the write is idempotent",
            ) from cause


def listed_object(key: str, head: Head) -> ObjectInfo | None:
    """Return a listed object; None if another program gave it a name that is not a valid key."""
    try:
        return ObjectInfo(check_key(key), head.size, head.modified.timestamp())
    except UsageError:
        return None
