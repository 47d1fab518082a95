"""The clients of `headrace bench store`, with their operations on a bucket or on a directory.

Invariants: every client transfers the same objects, and a read that returns another number of bytes raises. If a client
lacks an operation, its `Operations` lack the key, and the table shows a dash. Clients reuse buffers if their interface
allows it.

Failure behaviour: a client that lacks its package raises `ImportError`, which names the package.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.dataio.store.base import Store
from headrace.dataio.store.open import folder_of, open_store
from headrace.dataio.store.s3_config import S3Config, parse

PART_BYTES = 8 << 20
"""The size of each part of a multipart upload, in bytes."""
Operation = Callable[[str, int, int], int]
"""A function of (key, offset, size). It returns the number of transferred bytes, or of keys."""
Operations = Mapping[str, Operation]
Opener = Callable[[str, int, int], contextlib.AbstractContextManager[Operations]]


def clients_of(url: str) -> tuple[str, ...]:
    """Return the clients that are measured on this URL. Headrace is the first."""
    return S3_CLIENTS if url.startswith("s3://") else FILE_CLIENTS


def against(url: str) -> str:
    """Return the client that ratios refer to."""
    return "s3fs" if url.startswith("s3://") else "os"


def open_client(name: str, url: str, width: int, largest: int) -> contextlib.AbstractContextManager[Operations]:
    """Open client `name` for `width` threads and requests of at most `largest` bytes."""
    return _OPEN[name](url, width, largest)


class _Buffers:
    """Reusable buffers, and a body to write. They are aligned to pages, as O_DIRECT requires."""

    def __init__(self, largest: int) -> None:
        self.body = memoryview(random.Random(0).randbytes(largest))
        self._free: dict[int, list[memoryview]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one(self, size: int) -> Iterator[memoryview]:
        with self._lock:
            free = self._free.setdefault(size, [])
            buffer = free.pop() if free else memoryview(mmap.mmap(-1, size))
        yield buffer
        with self._lock:
            free.append(buffer)

    def parts(self, size: int) -> Iterator[memoryview]:
        for offset in range(0, size, PART_BYTES):
            yield self.body[offset : min(size, offset + PART_BYTES)]


@contextlib.contextmanager
def _headrace(url: str, width: int, largest: int, options: Mapping[str, object]) -> Iterator[Operations]:
    buffers = _Buffers(largest)
    with open_store(url, storage_options=options) as store:
        yield {
            **dict.fromkeys(("get", "range", "small"), lambda k, o, n: _read_into(store, buffers, k, o, n)),
            "put": lambda k, o, n: _after(store.put(k, buffers.body[:n]), n),
            "multipart": lambda k, o, n: store.put_multipart(k, buffers.parts(n)),
            "list": lambda k, o, n: sum(1 for _ in store.list(k)),
        }


def _read_into(store: Store, buffers: _Buffers, key: str, offset: int, size: int) -> int:
    with buffers.one(size) as buffer:
        store.get_into(key, offset, buffer)
    return size


def _after(_: object, size: int) -> int:
    return size


@contextlib.contextmanager
def _system_calls(url: str, width: int, largest: int) -> Iterator[Operations]:
    """The lower bound ("floor") for directories, with system calls only: pread, and write + fsync + rename."""
    root, buffers = folder_of(url), _Buffers(largest)

    def read(key: str, offset: int, size: int) -> int:
        fd = os.open(f"{root}/{key}", os.O_RDONLY)
        try:
            with buffers.one(size) as buffer:
                return _expect_size(os.preadv(fd, [buffer], offset), size)
        finally:
            os.close(fd)

    def write(key: str, _: int, size: int) -> int:
        path = f"{root}/{key}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        partial = f"{path}.{threading.get_ident()}"
        with open(partial, "wb", buffering=0) as file:
            for part in buffers.parts(size):
                file.write(part)
            os.fsync(file.fileno())
        os.rename(partial, path)
        return size

    reads = dict.fromkeys(("get", "range", "small"), read)
    yield {**reads, "put": write, "multipart": write, "list": lambda k, o, n: len(os.listdir(f"{root}/{k}"))}


@contextlib.contextmanager
def _s3fs(url: str, width: int, largest: int) -> Iterator[Operations]:
    import s3fs

    config, buffers = parse(url, {}), _Buffers(largest)
    addressing = {"addressing_style": "path" if config.path_style else "auto"}
    fs = s3fs.S3FileSystem(
        endpoint_url=config.endpoint_url,
        client_kwargs={"region_name": config.region} if config.region else {},
        config_kwargs={"max_pool_connections": max(10, width), "s3": addressing},
        use_listings_cache=False,
    )
    root = config.url.removeprefix("s3://")
    ranged = lambda k, o, n: _expect(fs.cat_file(f"{root}/{k}", start=o, end=o + n), n)  # noqa: E731
    yield {
        "get": lambda k, o, n: _expect(fs.cat_file(f"{root}/{k}"), n),
        "range": ranged,
        "small": ranged,
        "put": lambda k, o, n: _after(fs.pipe_file(f"{root}/{k}", bytes(buffers.body[:n])), n),
        "multipart": lambda k, o, n: _after(
            fs.pipe_file(f"{root}/{k}", bytes(buffers.body[:n]), chunksize=PART_BYTES), n
        ),
        "list": lambda k, o, n: len(fs.ls(f"{root}/{k}".rstrip("/"), refresh=True)),
    }


@contextlib.contextmanager
def _boto3(url: str, width: int, largest: int) -> Iterator[Operations]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config, buffers = parse(url, {}), _Buffers(largest)
    options = Config(
        max_pool_connections=max(10, width),
        s3={"addressing_style": "path" if config.path_style else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    client = boto3.client("s3", endpoint_url=config.endpoint_url, region_name=config.region, config=options)
    parts = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)

    def place(key: str) -> dict[str, str]:
        return {"Bucket": config.bucket, "Key": config.full_key(key)}

    def ranged(key: str, offset: int, size: int) -> int:
        answer = client.get_object(**place(key), Range=f"bytes={offset}-{offset + size - 1}")
        return _expect(answer["Body"].read(), size)

    def multipart(key: str, _: int, size: int) -> int:
        client.upload_fileobj(io.BytesIO(buffers.body[:size]), **place(key), Config=parts)
        return size

    def listed(prefix: str, *_: int) -> int:
        paginator = client.get_paginator("list_objects_v2")
        pages = paginator.paginate(Bucket=config.bucket, Prefix=config.full_key("x")[:-1] + prefix)
        return sum(page.get("KeyCount", 0) for page in pages)

    yield {
        "get": lambda k, o, n: _expect(client.get_object(**place(k))["Body"].read(), n),
        "range": ranged,
        "small": ranged,
        "put": lambda k, o, n: _after(client.put_object(**place(k), Body=bytes(buffers.body[:n])), n),
        "multipart": multipart,
        "list": listed,
    }


@contextlib.contextmanager
def _obstore(url: str, width: int, largest: int) -> Iterator[Operations]:
    import obstore

    config, buffers = parse(url, {}), _Buffers(largest)
    store = _native(config)

    def ranged(key: str, offset: int, size: int) -> int:
        return _expect(obstore.get_range(store, config.full_key(key), start=offset, length=size), size)

    def put(key: str, size: int, *, parts: bool) -> int:
        body = buffers.body[:size]
        contents: Any = io.BytesIO(body) if parts else body  # obstore accepts a stream as a file object
        obstore.put(
            store, config.full_key(key), contents, use_multipart=parts, chunk_size=PART_BYTES, max_concurrency=4
        )
        return size

    def listed(prefix: str, *_: int) -> int:
        return sum(len(page) for page in obstore.list(store, config.full_key("x")[:-1] + prefix))

    yield {
        "get": lambda k, o, n: _expect(obstore.get(store, config.full_key(k)).bytes(), n),
        "range": ranged,
        "small": ranged,
        "put": lambda k, o, n: put(k, n, parts=False),
        "multipart": lambda k, o, n: put(k, n, parts=True),
        "list": listed,
    }


def _native(config: S3Config) -> Any:
    from obstore.store import S3Store

    endpoint: dict[str, Any] = {"endpoint": config.endpoint_url} if config.endpoint_url else {}
    settings: dict[str, Any] = {
        **endpoint,
        "region": config.region or "us-east-1",
        "virtual_hosted_style_request": not config.path_style,
        "unsigned_payload": True,
    }
    native: Any = S3Store
    return native(config.bucket, config=settings, client_options={"allow_http": True})


def _expect(data: Any, size: int) -> int:
    return _expect_size(len(data), size)


def _expect_size(received: int, size: int) -> int:
    if received != size:
        raise AssertionError(f"{received} bytes instead of {size}")
    return size


def _headrace_with(**options: object) -> Opener:
    return lambda url, width, largest: _headrace(url, width, largest, options)


_OPEN: dict[str, Opener] = {
    "headrace": _headrace_with(),
    "headrace, s3fs": _headrace_with(client="s3fs"),
    "headrace, O_DIRECT": _headrace_with(direct=True),
    "s3fs": _s3fs,
    "boto3": _boto3,
    "obstore": _obstore,
    "os": _system_calls,
}
S3_CLIENTS = ("headrace", "headrace, s3fs", "s3fs", "boto3", "obstore")
FILE_CLIENTS = ("headrace", "headrace, O_DIRECT", "os")
