"""`headrace bench store [URL]`: Headrace and other clients on a bucket or a directory.

It measures throughput, latency percentiles, CPU seconds per GiB and memory of each client. Each combination of
operation, object size and concurrency is a cell. Without a URL it starts a SeaweedFS server on loopback, which uses the
same cores as its clients. Then compare only the rows with each other, not the figures with those of another machine.

Invariants:

- The cells are the same for every client. The results name the cells that a bound excludes.
- The benchmark writes only below a fresh random prefix, and deletes exactly the keys that it wrote, by name. It never
  deletes the keys of a listing, so it never touches an object of another program.
- The bounds hold for the whole run.

Failure behaviour: a client that fails, or that lacks its package, is named with the end of its error. The exit code
is then 1. An unknown operation is a `UsageError`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, Progress, alternate
from headrace.bench.core.report import part_table
from headrace.bench.core.results import Metric, Part
from headrace.bench.peers.object_stores import PART_BYTES, against, clients_of
from headrace.dataio.core.cli import argument
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB, KIB, MIB, format_bytes, parse_bytes
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import folder_of, open_store

OPERATIONS = ("get", "range", "small", "put", "multipart", "list")
"""The measured operations.

* `get` reads whole objects.
* `range` reads ranges, and `small` reads 4 KiB, at random offsets of the largest objects.
* `put` writes whole objects.
* `multipart` writes objects as a stream of 8 MiB parts.
* `list` lists a prefix with 200 objects, page by page.
"""
SMALL = 4 * KIB
LISTED = 200
COUNT = 8
"""The number of objects of each size, which are read or written in turn."""
MAX_HELD = 512 * MIB
"""The most bytes that a cell may hold in memory at once. Larger cells are skipped."""
_BLOCK = 16 * MIB


@dataclass(frozen=True, order=True)
class Cell:
    """One measurement: requests of `size` bytes (0 for `list`), with `width` requests in flight."""

    operation: str
    size: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.operation}_{self.size}_x{self.width}"

    @property
    def title(self) -> str:
        return f"{format_bytes(self.size)} ×{self.width}" if self.size else f"×{self.width}"


@dataclass(frozen=True)
class Sweep:
    """The cells to measure: operations, sizes in bytes, and numbers of requests in flight."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            raise UsageError(f"no operation {unknown[0]!r}", hint=f"there are {', '.join(OPERATIONS)}")
        if not self.sizes or not self.widths or min(self.sizes) < 1 or min(self.widths) < 1:
            raise UsageError("sizes and concurrencies are positive numbers")

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def cells(self) -> list[Cell]:
        """Return the cells that fit in memory."""
        return [cell for cell in self._all() if cell.size * cell.width <= MAX_HELD]

    def left_out(self) -> list[Cell]:
        """Return the cells that do not fit in memory."""
        return [cell for cell in self._all() if cell.size * cell.width > MAX_HELD]

    def _all(self) -> list[Cell]:
        return [
            Cell(operation, size, width)
            for operation in self.operations
            for size in self._sizes(operation)
            for width in self.widths
        ]

    def _sizes(self, operation: str) -> Sequence[int]:
        if operation == "list":
            return (0,)
        if operation == "small":
            return (SMALL,) if self.largest > SMALL else ()
        return tuple(size for size in self.sizes if operation != "multipart" or size >= PART_BYTES)

    def key_of(self, cell: Cell, number: int) -> str:
        """Return the key of a request. Reads share the prepared objects, and writers have their own."""
        if cell.operation == "list":
            return "list/"
        size = self.largest if cell.operation in ("range", "small") else cell.size
        kind = "read" if cell.operation in ("get", "range", "small") else cell.operation
        return f"{kind}/{size}/{number % COUNT}"

    def prepared(self) -> dict[str, int]:
        """Return the key and size of each object that must exist before the first request."""
        sizes = set(self.sizes if "get" in self.operations else ())
        if {"range", "small"} & set(self.operations):
            sizes.add(self.largest)
        sizes_by_key = {f"read/{size}/{number}": size for size in sorted(sizes) for number in range(COUNT)}
        if "list" in self.operations:
            sizes_by_key |= {f"list/{number:05d}": 16 for number in range(LISTED)}
        return sizes_by_key

    def all_keys(self) -> list[str]:
        """Return every key that the sweep may have written."""
        writers = [cell for cell in self.cells() if cell.operation in ("put", "multipart")]
        written = {self.key_of(cell, number) for cell in writers for number in range(COUNT)}
        return sorted(written | set(self.prepared()))

    def metrics(self) -> dict[str, Metric]:
        """Return throughput, percentiles and CPU of every cell, and the peak memory of the client."""
        metrics: dict[str, Metric] = {}
        for cell in self.cells():
            axes: dict[str, str | float] = {
                "operation": cell.operation,
                "size": cell.size,
                "concurrency": cell.width,
            }
            unit = "MB/s" if cell.size else "keys/s"
            metrics[cell.name] = Metric(cell.title, unit, "higher", quantity="throughput", axes=axes)
            for share in ("p50", "p99", "p999"):
                metrics[f"{cell.name}_{share}"] = Metric(cell.title, "ms", quantity=f"latency {share}", axes=axes)
            if cell.size:
                metrics[f"{cell.name}_cpu"] = Metric(cell.title, "s/GiB", quantity="cpu", axes=axes)
        return metrics | {"peak_mib": Metric("peak MiB", "MiB")}


class ClientJob(msgspec.Struct, kw_only=True):
    """The measurements of one client.

    `seconds` and `cell_bytes` limit a cell, `all_seconds` and `all_bytes` the process.
    """

    client: str
    url: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: float
    cell_bytes: int
    all_seconds: float
    all_bytes: int


def show(part: Part) -> str:
    """Return tables of throughput, p99 and CPU seconds for each operation, and a table of the peak memory."""
    lines = []
    for operation in OPERATIONS:
        for quantity, unit in (("throughput", "MB/s"), ("latency p99", "ms"), ("cpu", "CPU s/GiB")):
            names = [
                name
                for name, metric in part.metrics.items()
                if metric.quantity == quantity and metric.axes.get("operation") == operation
            ]
            if names:
                shown = "keys/s" if (operation, quantity) == ("list", "throughput") else unit
                lines.append(f"### {operation}: {quantity}, {shown}\n\n{part_table(part, names)}\n")
    return "\n".join([*lines, part_table(part, ["peak_mib"])])


@benchmark(
    "store",
    "Measure a bucket or a directory by operation, object size and requests at once, compared with other clients.\n\n"
    "Without a URL a SeaweedFS is started on this machine. Only a fresh prefix below the URL is written to, and exactly\n"
    "what was written is deleted again, by name.",
    argument("url", nargs="?", help="s3://bucket/prefix or a directory; without it a server is started"),
    argument("--operations", default=",".join(OPERATIONS), help="default: %(default)s"),
    argument("--sizes", default="256KiB,8MiB,64MiB", help="object sizes (default: %(default)s)"),
    argument("--threads", default="1,4,16", help="requests at once (default: %(default)s)"),
    argument("--clients", help="which to measure, separated by semicolons (default: all)"),
    argument("--seconds", type=float, default=0.7, help="a cell lasts at most (default: %(default)s)"),
    argument("--bytes", type=parse_bytes, default=128 * MIB, help="a cell moves at most (default: 128MiB)"),
    argument("--duration", type=float, default=1200, help="seconds of measuring at most (default: %(default)s)"),
    argument(
        "--max-bytes",
        type=parse_bytes,
        default=64 * GIB,
        help="bytes to move at most, all clients and rounds (default: 64GiB)",
    ),
    show=show,
)
def store(job: Job, part: Part) -> None:
    """Write the objects, measure the clients in turn, and delete the objects."""
    args = job.args
    sweep = Sweep(tuple(args.operations.split(",")), _sizes(args.sizes), _parse_numbers(args.threads))
    names = _clients(args.clients, args.url or "s3://")
    with fresh_prefix(args.url, sweep, job.progress) as url:
        kind = "S3" if url.startswith("s3://") else "directory"
        part.title = f"Store: {kind}, by operation, size and requests at once"
        part.metrics, part.against = sweep.metrics(), against(url)
        client_jobs = {name: msgspec.to_builtins(_client_job(args, url, sweep, name, len(names))) for name in names}
        settings = next(iter(client_jobs.values())) | {"url": args.url or "SeaweedFS on loopback"}
        part.settings = {name: value for name, value in settings.items() if name != "client"}
        part.notes = [_caching_note(url), *_left_out(sweep)]
        candidates = [
            Candidate(name, "headrace.bench.workloads.store_worker:measure_in_process", (client_job,))
            for name, client_job in client_jobs.items()
        ]
        alternate(candidates, job.rounds, job.progress, part.candidates, seconds=args.duration + 120)
    if any("skipped_cells" in samples.metrics for samples in part.candidates.values()):
        part.notes.append("some cells were left out: --duration or --max-bytes was reached (skipped_cells in the JSON)")


def _client_job(args: argparse.Namespace, url: str, sweep: Sweep, client: str, clients: int) -> ClientJob:
    share = max(1, args.rounds * clients)
    return ClientJob(
        client=client,
        url=url,
        operations=sweep.operations,
        sizes=sweep.sizes,
        widths=sweep.widths,
        seconds=args.seconds,
        cell_bytes=args.bytes,
        all_seconds=args.duration / share,
        all_bytes=args.max_bytes // share,
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(parse_bytes(part) for part in text.split(",")))


def _parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{text!r} is not a list of numbers", hint="write for example 1,4,16") from None


def _clients(chosen: str | None, url: str) -> tuple[str, ...]:
    supported = clients_of(url)
    if chosen is None:
        return supported
    names = tuple(name.strip() for name in chosen.split(";"))
    if unknown := [name for name in names if name not in supported]:
        raise UsageError(f"no client {unknown[0]!r} for {url}", hint=f"there are {'; '.join(supported)}")
    return names


def _caching_note(url: str) -> str:
    if url.startswith("s3://"):
        return "Reads of objects: whatever the server caches is as it was; objects were written just before."
    return "Reads of files: through a warm page cache, except those of the client with O_DIRECT from 1 MiB on."


def _left_out(sweep: Sweep) -> list[str]:
    names = ", ".join(f"{cell.operation} {cell.title}" for cell in sweep.left_out())
    return [f"Left out, as more than {format_bytes(MAX_HELD)} would be held at once: {names}."] if names else []


@contextlib.contextmanager
def fresh_prefix(url: str | None, sweep: Sweep, progress: Progress) -> Iterator[str]:
    """Yield the URL of a fresh prefix with the objects to read.

    At the end, exactly the sweep's own keys are deleted.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            from headrace.dataio.testing.s3_server import start_seaweedfs

            server = stack.enter_context(start_seaweedfs())
            os.environ.update(server.environment())  # for the clients' processes
            url = server.create_bucket("bench")
        base = url if "://" in url else Path(url).resolve().as_uri()
        if not base.startswith(("s3://", "file://")):
            raise UsageError(f"{url!r} is neither a bucket nor a directory", hint="give s3://bucket/prefix or a path")
        prefix = f"{base.rstrip('/')}/headrace-bench-{uuid.uuid4().hex}"
        stack.callback(_clear, prefix, sweep)
        with open_store(prefix) as opened:
            _prepare(opened, sweep, progress)
        yield prefix


def _prepare(opened: Store, sweep: Sweep, progress: Progress) -> None:
    """Write the objects to read. The contents are random, so that they cannot be compressed."""
    objects = sweep.prepared()
    for place, (key, size) in enumerate(objects.items()):
        progress("writing objects", place / len(objects))
        if size <= _BLOCK:
            opened.put(key, random.Random(key).randbytes(size))
        else:
            opened.put_multipart(key, _blocks(key, size))


def _blocks(key: str, size: int) -> Iterator[bytes]:
    block = random.Random(key).randbytes(_BLOCK)
    while size > 0:
        yield block[:size]
        size -= len(block)


def _clear(prefix: str, sweep: Sweep) -> None:
    with open_store(prefix) as opened:
        opened.delete_many(sweep.all_keys())
    if prefix.startswith("file://"):
        _remove_empty(folder_of(prefix))


def _remove_empty(root: Path) -> None:
    """Remove the folders that the benchmark created, if they are empty."""
    for folder in (*sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True), root):
        with contextlib.suppress(OSError):
            folder.rmdir()
