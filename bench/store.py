"""GET and PUT by object size and concurrency: the store beside raw s3fs, boto3 and obstore, on the same bucket.

Purpose: `millrace bench store [URL]`, or `python -m bench.store [URL]`, prints MB/s and CPU seconds per GiB of this
process. Without a URL it starts a SeaweedFS on loopback, which then shares the cores with its clients: compare the rows,
not the figures with another machine's.
Invariant: every candidate moves the same objects with the same number of threads; objects are written under a random
prefix and deleted at the end. A GET that returns another number of bytes fails its candidate.
Failure behaviour: a candidate that fails, or whose package is missing, is named with its last words, and the exit code is
1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measure import Candidate, Meter, Samples, alternate, environment, table
from dataio.core.errors import UsageError
from dataio.core.limits import GIB, MIB, format_bytes, parse_bytes
from dataio.store.contract import Store
from dataio.store.open import open_store
from dataio.store.s3config import S3Config, parse

CANDIDATES = ("millrace", "millrace, s3fs", "s3fs", "boto3", "obstore")
_AGAINST = "s3fs"
_OBJECTS = 8
_CELL_BYTES = 512 * MIB
"""Cells that would hold more than this at once are left out."""

Operation = Callable[[str, int], None]
"""Moves the object of this key and size."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, or one candidate of it; the exit code."""
    args = _parser().parse_args(argv)
    if args.candidate:
        print(json.dumps(measure(args.candidate, args.url, args.sizes, args.threads, args.bytes)))
        return 0
    with _place(args.url) as url:
        _prepare(url, args.sizes)
        own = ["--bytes", str(args.bytes), "--sizes", ",".join(map(str, args.sizes))]
        own += ["--threads", ",".join(map(str, args.threads))]
        found = alternate(
            [Candidate(name, "bench.store", (url, "--candidate", name, *own)) for name in CANDIDATES],
            args.rounds,
            _tell,
        )
    return _report(args, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace bench store",
        description="Measure GET and PUT of an S3 bucket beside raw s3fs, boto3 and obstore.",
        epilog="exit codes: 0 all candidates ran; 1 one failed and is named; others as in millrace --help",
    )
    parser.add_argument("url", nargs="?", help="s3://bucket/prefix; without it a server is started on loopback")
    parser.add_argument("--rounds", type=int, default=3, help="times that every candidate runs (default: %(default)s)")
    parser.add_argument("--sizes", type=_sizes, default=_sizes("256KiB,8MiB,64MiB"), help="default: 256KiB,8MiB,64MiB")
    parser.add_argument("--threads", type=_numbers, default=[1, 4, 16], help="requests in flight (default: 1,4,16)")
    parser.add_argument(
        "--bytes", type=parse_bytes, default=128 * MIB, help="least to move in a cell (default: 128MiB)"
    )
    parser.add_argument("-o", "--output", type=Path, help="write raw samples and environment to this JSON file")
    parser.add_argument("--json", action="store_true", help="print that JSON instead of tables")
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    return parser


def _sizes(text: str) -> list[int]:
    return [parse_bytes(part) for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@contextlib.contextmanager
def _place(url: str | None) -> Iterator[str]:
    """The URL of an empty prefix, emptied again at the end."""
    with contextlib.ExitStack() as stack:
        if url is None:
            from dataio.testing.s3server import start_seaweedfs

            server = stack.enter_context(start_seaweedfs())
            os.environ.update(server.environment())  # the candidates are processes of their own and find it there
            url = server.create_bucket("bench")
        if not url.startswith("s3://"):
            raise UsageError(f"{url!r} is no bucket", hint="give s3://bucket/prefix, or nothing")
        place = f"{url.rstrip('/')}/millrace-bench-{uuid.uuid4().hex}"
        stack.callback(_clear, place)
        yield place


def _clear(place: str) -> None:
    with open_store(place) as store:
        store.delete_many([info.key for info in store.list()])


def _prepare(place: str, sizes: Sequence[int]) -> None:
    with open_store(place) as store:
        for size in sizes:
            for key in _keys("get", size):
                store.put(key, random.Random(size).randbytes(size))


def _keys(operation: str, size: int) -> list[str]:
    return [f"{operation}/{size}/{number}" for number in range(_OBJECTS)]


def measure(candidate: str, url: str, sizes: Sequence[int], threads: Sequence[int], least: int) -> dict[str, float]:
    """MB/s of every cell that fits, by name, and CPU seconds per GiB of all GETs and all PUTs of a size."""
    out: dict[str, float] = {}
    with _BUILD[candidate](parse(url, {}), max(threads), max(sizes)) as operations:
        for name, operation in operations.items():
            operation(_keys(name, sizes[0])[0], sizes[0])  # connect
            for size in sizes:
                cpu, moved = 0.0, 0
                for width in (w for w in threads if w * size <= _CELL_BYTES):
                    count = max(width, least // size)
                    read = _timed(operation, name, size, width, count)
                    out[f"{name}_{size}_x{width}"] = size * count / read["wall_s"] / 1e6
                    cpu, moved = cpu + read["cpu_s"], moved + size * count
                out[f"{name}_{size}_cpu"] = cpu / moved * GIB
    return out | {"peak_mib": Meter().read()["peak_mib"]}


def _timed(operation: Operation, name: str, size: int, width: int, count: int) -> dict[str, float]:
    keys = _keys(name, size)
    with ThreadPoolExecutor(width) as pool:
        list(pool.map(time.sleep, [0.01] * width))  # start the threads
        if name == "get":  # and make their buffers and connections
            list(pool.map(lambda number: operation(keys[number % _OBJECTS], size), range(width)))
        meter = Meter()
        list(pool.map(lambda number: operation(keys[number % _OBJECTS], size), range(count)))
        return meter.read()


class _Buffers:
    """A reused buffer for each thread, and a body to write."""

    def __init__(self, most: int) -> None:
        self.body = memoryview(random.Random(0).randbytes(most))
        self._free: dict[int, list[bytearray]] = {}

    @contextlib.contextmanager
    def one(self, size: int) -> Iterator[memoryview]:
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else bytearray(size)
        yield memoryview(buffer)
        free.append(buffer)


@contextlib.contextmanager
def _millrace(config: S3Config, width: int, most: int, client: str | None = None) -> Iterator[dict[str, Operation]]:
    buffers = _Buffers(most)
    options = {"client": client} if client else {}
    with open_store(config.url, **options) as store:
        yield {"get": lambda k, n: _read_into(store, buffers, k, n), "put": lambda k, n: store.put(k, buffers.body[:n])}


def _read_into(store: Store, buffers: _Buffers, key: str, size: int) -> None:
    with buffers.one(size) as buffer:
        store.get_into(key, 0, buffer)


@contextlib.contextmanager
def _s3fs(config: S3Config, width: int, most: int) -> Iterator[dict[str, Operation]]:
    import s3fs

    body = _Buffers(most).body
    addressing = {"addressing_style": "path" if config.path_style else "auto"}
    fs = s3fs.S3FileSystem(
        endpoint_url=config.endpoint_url,
        client_kwargs={"region_name": config.region} if config.region else {},
        config_kwargs={"max_pool_connections": max(10, width), "s3": addressing},
    )
    root = config.url.removeprefix("s3://")
    yield {
        "get": lambda k, n: _expect(fs.cat_file(f"{root}/{k}"), n),
        "put": lambda k, n: fs.pipe_file(f"{root}/{k}", bytes(body[:n])),
    }


@contextlib.contextmanager
def _boto3(config: S3Config, width: int, most: int) -> Iterator[dict[str, Operation]]:
    import boto3
    from botocore.config import Config

    body = _Buffers(most).body
    options = Config(
        max_pool_connections=max(10, width),
        s3={"addressing_style": "path" if config.path_style else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    client = boto3.client("s3", endpoint_url=config.endpoint_url, region_name=config.region, config=options)

    def place(key: str) -> dict[str, str]:
        return {"Bucket": config.bucket, "Key": config.full_key(key)}

    yield {
        "get": lambda k, n: _expect(client.get_object(**place(k))["Body"].read(), n),
        "put": lambda k, n: client.put_object(**place(k), Body=bytes(body[:n])),
    }


@contextlib.contextmanager
def _obstore(config: S3Config, width: int, most: int) -> Iterator[dict[str, Operation]]:
    import obstore
    from obstore.store import S3Store

    body = _Buffers(most).body
    endpoint: dict[str, Any] = {"endpoint": config.endpoint_url} if config.endpoint_url else {}
    settings: dict[str, Any] = {
        **endpoint,
        "region": config.region or "us-east-1",
        "virtual_hosted_style_request": not config.path_style,
        "unsigned_payload": True,
    }
    native: Any = S3Store
    store = native(config.bucket, config=settings, client_options={"allow_http": True})
    yield {
        "get": lambda k, n: _expect(obstore.get(store, config.full_key(k)).bytes(), n),
        "put": lambda k, n: _put_native(obstore, store, config.full_key(k), body[:n]),
    }


def _put_native(obstore: Any, store: Any, key: str, body: memoryview) -> None:
    obstore.put(store, key, body, use_multipart=False)


def _expect(data: Any, size: int) -> None:
    if len(data) != size:
        raise AssertionError(f"{len(data)} bytes instead of {size}")


_BUILD: dict[str, Callable[[S3Config, int, int], contextlib.AbstractContextManager[dict[str, Operation]]]] = {
    "millrace": _millrace,
    "millrace, s3fs": lambda config, width, most: _millrace(config, width, most, "s3fs"),
    "s3fs": _s3fs,
    "boto3": _boto3,
    "obstore": _obstore,
}


def _report(args: argparse.Namespace, found: dict[str, Samples]) -> int:
    report = {
        "environment": environment(),
        "rounds": args.rounds,
        "store": {name: asdict(samples) for name, samples in found.items()},
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))
    if args.json:
        print(json.dumps(report))
    else:
        for operation in ("get", "put"):
            print(f"\n## {operation.upper()}: MB/s by size and requests in flight, CPU s/GiB of the client\n")
            print(table(found, _columns(operation, args.sizes, args.threads), _AGAINST))
    return 1 if any(samples.errors for samples in found.values()) else 0


def _columns(operation: str, sizes: Sequence[int], threads: Sequence[int]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for size in sizes:
        for width in (w for w in threads if w * size <= _CELL_BYTES):
            columns[f"{operation}_{size}_x{width}"] = f"{format_bytes(size)} ×{width}"
        columns[f"{operation}_{size}_cpu"] = "CPU s/GiB"
    return columns | ({"peak_mib": "peak MiB"} if operation == "put" else {})


def _tell(name: str, share: float) -> None:
    print(f"{share:4.0%} {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
