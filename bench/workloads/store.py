"""`headrace bench store [URL]`: Headrace and other clients on a bucket or a directory.

It measures throughput, latency percentiles, CPU seconds per GiB and memory of each client, by operation, object size
and concurrency. Without a URL it starts a SeaweedFS on loopback, which shares the cores with its clients. Then compare
only the rows with each other, not the figures with those of another machine.
Invariant: the benchmark writes only below a fresh random prefix, and deletes exactly the keys that it wrote, by name.
The bounds hold for the whole run. The results name the cells that the bounds exclude.
Failure behaviour: a client that fails, or whose package is missing, is named with the end of its error. The exit code
is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from headrace.bench.core import command, machine
from headrace.bench.core.measure import Candidate, Tell, alternate
from headrace.bench.core.results import Metric, Part
from headrace.bench.core.table import part_table
from headrace.bench.peers.object_stores import against, clients_of
from headrace.bench.workloads import store_sweep
from headrace.bench.workloads.store_worker import Order
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB, MIB, format_bytes, parse_bytes
from headrace.dataio.store.open import folder_of, open_store

_ABOUT = """\
Measure a bucket or a directory by operation, object size and requests at once, compared with other clients.

Without a URL a SeaweedFS is started on this machine. Only a fresh prefix below the URL is written to, and exactly what was
written is deleted again, by name."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and return the exit code."""
    return command.run(argv, "store", _ABOUT, fill, _options, show=show)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", help="s3://bucket/prefix or a directory; without it a server is started")
    parser.add_argument("--operations", default=",".join(store_sweep.OPERATIONS), help="default: %(default)s")
    parser.add_argument("--sizes", default="256KiB,8MiB,64MiB", help="object sizes (default: %(default)s)")
    parser.add_argument("--threads", default="1,4,16", help="requests at once (default: %(default)s)")
    parser.add_argument("--clients", help="which to measure, separated by semicolons (default: all)")
    parser.add_argument("--seconds", type=float, default=0.7, help="a cell lasts at most (default: %(default)s)")
    parser.add_argument("--bytes", type=parse_bytes, default=128 * MIB, help="a cell moves at most (default: 128MiB)")
    parser.add_argument(
        "--duration", type=float, default=1200, help="seconds of measuring at most (default: %(default)s)"
    )
    parser.add_argument(
        "--max-bytes",
        type=parse_bytes,
        default=64 * GIB,
        help="bytes to move at most, all clients and rounds (default: 64GiB)",
    )
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before every read")


def fill(job: command.Job, part: Part) -> None:
    """Write the objects, measure the clients in turn, and delete the objects."""
    args = job.args
    sweep = store_sweep.Sweep(tuple(args.operations.split(",")), _sizes(args.sizes), _numbers(args.threads))
    with _place(args.url, sweep, job.tell) as url:
        names = _clients(args.clients, url)
        part.title = (
            f"Store: {'S3' if url.startswith('s3://') else 'directory'}, by operation, size and requests at once"
        )
        part.metrics, part.against = store_sweep.metrics(sweep.cells()), against(url)
        part.metrics = _limited(part.metrics, url, cold=args.cold)
        part.settings = msgspec.to_builtins(_order(args, url, sweep, "", len(names))) | {"url": _shown(args.url)}
        del part.settings["client"]
        part.notes = [_caching(url, cold=args.cold), *_left_out(sweep)]
        wanted = [
            Candidate(
                name, "headrace.bench.workloads.store_worker", (_text(_order(args, url, sweep, name, len(names))),)
            )
            for name in names
        ]
        alternate(wanted, job.rounds, job.tell, part.candidates, seconds=args.duration + 120)
    part.notes += store_sweep.sentences(sweep.cells(), part.candidates)
    if any("skipped_cells" in samples.metrics for samples in part.candidates.values()):
        part.notes.append("some cells were left out: --duration or --max-bytes was reached (skipped_cells in the JSON)")


def _limited(metrics: dict[str, Metric], url: str, *, cold: bool) -> dict[str, Metric]:
    """Add the disk's limit to the metrics of directories.

    The limit is the rate of one thread. It applies to writes and cold reads in cells with one request at a time.
    """
    if url.startswith("s3://"):
        return metrics
    folder = folder_of(url)
    limits = dict.fromkeys(("put", "multipart"), machine.write_rate(folder))
    if cold:
        limits |= dict.fromkeys(store_sweep.READS, machine.read_rate(folder))
    return {
        name: structs.replace(metric, limit=limits[operation].rate / 1e6, limit_why=limits[operation].why)
        if metric.quantity == "throughput" and metric.axes["concurrency"] == 1 and operation in limits
        else metric
        for name, metric in metrics.items()
        for operation in [str(metric.axes.get("operation", ""))]
    }


def _order(args: argparse.Namespace, url: str, sweep: store_sweep.Sweep, client: str, clients: int) -> Order:
    share = max(1, args.rounds * clients)
    return Order(
        client,
        url,
        sweep.operations,
        sweep.sizes,
        sweep.widths,
        args.seconds,
        args.bytes,
        args.duration / share,
        args.max_bytes // share,
        args.cold,
    )


def _text(order: Order) -> str:
    return msgspec.json.encode(order).decode()


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(parse_bytes(part) for part in text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{text!r} is no list of numbers", hint="write for example 1,4,16") from None


def _clients(wanted: str | None, url: str) -> tuple[str, ...]:
    known = clients_of(url)
    if wanted is None:
        return known
    names = tuple(name.strip() for name in wanted.split(";"))
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no client {unknown[0]!r} for {url}", hint=f"there are {'; '.join(known)}")
    return names


def _shown(url: str | None) -> str:
    return url or "SeaweedFS on loopback"


def _caching(url: str, *, cold: bool) -> str:
    if url.startswith("s3://"):
        return "Reads of objects: whatever the server caches is as it was; objects were written just before."
    if cold:
        return "Reads of files: every file is dropped from the page cache (posix_fadvise) before each request."
    return "Reads of files: through a warm page cache, except those of the client with O_DIRECT from 1 MiB on."


def _left_out(sweep: store_sweep.Sweep) -> list[str]:
    names = ", ".join(f"{cell.operation} {cell.title}" for cell in sweep.left_out())
    return (
        [f"Left out, as more than {format_bytes(store_sweep.MAX_HELD)} would be held at once: {names}."]
        if names
        else []
    )


@contextlib.contextmanager
def _place(url: str | None, sweep: store_sweep.Sweep, tell: Tell) -> Iterator[str]:
    """Yield the URL of a fresh prefix with the objects to read. At the end, exactly the sweep's own keys are
    deleted."""
    with contextlib.ExitStack() as stack:
        if url is None:
            from headrace.dataio.testing.s3_server import start_seaweedfs

            server = stack.enter_context(start_seaweedfs())
            os.environ.update(server.environment())  # for the clients' processes
            url = server.create_bucket("bench")
        base = url if "://" in url else Path(url).resolve().as_uri()
        if not base.startswith(("s3://", "file://")):
            raise UsageError(f"{url!r} is neither a bucket nor a directory", hint="give s3://bucket/prefix or a path")
        place = f"{base.rstrip('/')}/{store_sweep.fresh_prefix()}"
        stack.callback(_clear, place, sweep)
        with open_store(place) as store:
            store_sweep.prepare(store, sweep, tell)
        yield place


def _clear(place: str, sweep: store_sweep.Sweep) -> None:
    with open_store(place) as store:
        store.delete_many(store_sweep.all_keys(sweep))
    if place.startswith("file://"):
        _remove_empty(folder_of(place))


def _remove_empty(root: Path) -> None:
    """Remove the folders that the benchmark made, if they are empty."""
    for folder in (*sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True), root):
        with contextlib.suppress(OSError):
            folder.rmdir()


def show(part: Part) -> str:
    """Return tables of throughput, p99 and CPU seconds for each operation, and one of the peak memory."""
    lines = []
    for operation in store_sweep.OPERATIONS:
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
