"""`headrace bench sidecar`: throughput, latency, CPU and memory of the node's daemon, with medians and spread.

Every round runs every measurement once, so drift of the machine affects all of them equally. The dataset is synthetic:
random bytes in files of the sizes of short clips (video, audio and text), on local disk. Ranks and daemon are real
processes, and a rank copies every byte of its batches. Compared measurements (with and without the daemon, mapped and
plain) alternate. A first epoch begins with as much free memory as it will fill (`Memory`). The reason is that a virtual
machine may return free memory to its host. The first use of a page that was free for some seconds then takes several
times longer.

Invariant: only figures that were measured in this run are printed.

Failure behaviour: a rank or daemon that fails ends the benchmark.
"""

from __future__ import annotations

import contextlib
import mmap
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import xxhash

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.processes import DaemonProcess, daemon, server
from headrace.bench.core.results import Metric, Part, Samples
from headrace.bench.workloads.sidecar_rank import RankJob, Shape, run_ranks, write_shards
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.files import storage_kind
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.client import Sidecar, open_reader
from headrace.dataio.store.open import open_store

OPENS = 2000
IDLE_SECONDS = 4.0
CLIENTS = 1000
LIMITED = Shape(shards=8, per_shard=48)
RATE = 40e6
"""The bandwidth of the slow server, in bytes per second."""


FIGURES = {
    "first_1": Metric("samples/s, 1 rank, first epoch", "1/s", "higher", goal=4000),
    "cpu_first_1": Metric("CPU s per 1k, 1 rank, first epoch, daemon included", "s", "lower", goal=0.30),
    "later_1": Metric("samples/s, 1 rank, later epochs", "1/s", "higher", goal=4000),
    "cpu_1": Metric("CPU s per 1k, 1 rank, later epochs, daemon included", "s", "lower", goal=0.30),
    "batch_1": Metric("first warm batch, 1 rank, ms", "ms", "lower", goal=40),
    "floor": Metric("  reading, XXH3 and writing the same bytes in one thread, samples/s", "1/s", "higher"),
    "cpu_floor": Metric("  CPU s per 1k of that, and of mapping and copying it once, in one thread", "s", "lower"),
    "first_4": Metric("samples/s, 4 ranks, first epoch", "1/s", "higher", goal=4000),
    "cpu_first_4": Metric("CPU s per 1k, 4 ranks, first epoch, daemon included", "s", "lower", goal=0.30),
    "later_4": Metric("samples/s, 4 ranks, later epochs", "1/s", "higher", goal=4000),
    "cpu_4": Metric("CPU s per 1k, 4 ranks, later epochs, daemon included", "s", "lower", goal=0.30),
    "batch_4": Metric("first warm batch, slowest of 4 ranks, ms", "ms", "lower", goal=40),
    "s3_1": Metric("samples/s, 1 rank, first epoch from S3 on loopback", "1/s", "higher", goal=1200),
    "cpu_s3_1": Metric("CPU s per 1k there, daemon included, server not", "s", "lower"),
    "s3_4": Metric("samples/s, 4 ranks, first epoch from S3 on loopback", "1/s", "higher", goal=1200),
    "cpu_s3_4": Metric("CPU s per 1k there, daemon included, server not", "s", "lower"),
    "rss_s3_fast": Metric("  the most of the daemon's RSS meanwhile, MiB", "MiB", "lower", goal=120),
    "open": Metric("Open of a cached block, p50, µs", "µs", "lower", goal=60),
    "looked": Metric("  of them answered before the client slept, %", "%", "higher"),
    "bare": Metric("  a bare Unix socket's round trip, p50, µs", "µs", "lower"),
    "mmap": Metric("cached read ÷ plain mmap of the same file", "ratio", "higher", goal=0.9),
    "cold": Metric(
        f"4 ranks, server at {RATE / 1e6:.0f} MB/s, cold: with ÷ without the sidecar", "ratio", "higher", goal=3.5
    ),
    "idle": Metric("daemon idle, % of a core", "%", "lower", goal=0.5),
    "rss": Metric("daemon RSS after work and idle, MiB", "MiB", "lower", goal=120),
    "rss_s3": Metric("  the most of it while it fetches from S3 for 4 ranks, MiB", "MiB", "lower", goal=120),
    "clients": Metric("clients connected at once, all answered", "1", "higher", goal=CLIENTS),
    "open_among": Metric("  Open p50 among them, µs", "µs", "lower", goal=60),
}
PARTS = ("deliver", "s3", "quiet", "cold")
FigureSamples = dict[str, list[float]]


@benchmark(
    "sidecar",
    "The figures of the node's daemon.",
    argument("--shards", type=positive_int, default=6, help="shards of 32 MB (default: %(default)s; 28 is 0.9 GB)"),
    argument("--cache-dir", type=Path, help="where the caches go, such as a tmpfs (default: the scratch folder)"),
    argument("--only", choices=PARTS, action="append", help="measure this part alone; may be repeated"),
)
def sidecar(job: Job, part: Part) -> None:
    """Measure all figures, each once a round. The exit code does not depend on the figures."""
    args, shape = job.args, Shape(shards=job.args.shards)
    part.title, part.metrics, part.settings = "Sidecar: one node", FIGURES, {"shards": args.shards}
    figures = part.candidates.setdefault("headrace", Samples({name: [] for name in FIGURES})).metrics
    if args.cache_dir is not None:
        part.settings["cache on"] = storage_kind(args.cache_dir)
    with tempfile.TemporaryDirectory(prefix="mb-", dir=args.cache_dir or job.scratch) as caches:
        measure(job.scratch, Path(caches), shape, job.rounds, figures, args.only or PARTS)


def measure(
    scratch: Path, caches: Path, shape: Shape, rounds: int, figures: FigureSamples, parts: Sequence[str] = PARTS
) -> None:
    """In each round, add a sample of every figure of `parts` to `figures`."""
    data = scratch / "data" / "bucket" / "ds"
    write_shards(data, shape)
    limited = scratch / "limited" / "bucket" / "ds"
    write_shards(limited, LIMITED)
    write_shards(limited.with_name("other"), Shape(shards=1, per_shard=1))
    warm_page_cache(data)
    for number in range(rounds):
        folder = caches / f"r{number}"
        if "deliver" in parts:
            seconds, cpu = single_pass(data, caches, shape)
            figures["floor"].append(shape.samples / seconds)
            figures["cpu_floor"].append(1000 * cpu / shape.samples)
            for ranks in (1, 4):
                deliver(folder / f"d{ranks}", f"file://{data}", shape, ranks, figures)
        if "s3" in parts:
            for ranks in (1, 4):
                from_s3(folder / f"s{ranks}", data.parents[1], shape, ranks, figures)
        if "quiet" in parts:
            with daemon(folder / "quiet", cache_bytes="4GiB", clients=str(CLIENTS + 100)) as running:
                quiet(running, f"file://{data}", shape, figures)
        if "cold" in parts:
            cold(folder, limited.parents[1], figures)


def deliver(folder: Path, url: str, shape: Shape, ranks: int, figures: FigureSamples) -> None:
    """Deliver a first epoch and two later ones through a daemon. Its cache is large enough for the dataset."""
    with daemon(folder, cache_bytes="4GiB") as running:
        for name, epoch, epochs in (("first", 0, 1), ("later", 1, 2)):
            memory = Memory(folder, 0 if epoch else shape.total_bytes)
            before = running.cpu_seconds()
            jobs = [
                RankJob(url, str(running.socket), shape, rank=r, ranks=ranks, epochs=epochs, first_epoch=epoch)
                for r in range(ranks)
            ]
            _, of_ranks = run_ranks(jobs, before=memory.free)
            samples = sum(figure["samples"] for figure in of_ranks)
            figures[f"{name}_{ranks}"].append(samples / max(figure["wall_s"] for figure in of_ranks))
            cpu = sum(figure["cpu_s"] for figure in of_ranks) + running.cpu_seconds() - before
            figures[f"cpu_{ranks}" if epoch else f"cpu_first_{ranks}"].append(1000 * cpu / samples)
        figures[f"batch_{ranks}"].append(1000 * max(figure["first_batch_s"] for figure in of_ranks))


def from_s3(folder: Path, root: Path, shape: Shape, ranks: int, figures: FigureSamples) -> None:
    """Deliver a first epoch from an S3 server on this machine. The server uses the same cores."""
    with server(root) as s3, daemon(folder, s3.environ, cache_bytes="4GiB") as running:
        memory = Memory(folder, shape.total_bytes)
        before = running.cpu_seconds()
        jobs = [RankJob("s3://bucket/ds", str(running.socket), shape, rank=rank, ranks=ranks) for rank in range(ranks)]
        _, of_ranks = run_ranks(jobs, s3.environ, before=memory.free)
        samples = sum(figure["samples"] for figure in of_ranks)
        cpu = sum(figure["cpu_s"] for figure in of_ranks) + running.cpu_seconds() - before
        figures[f"s3_{ranks}"].append(samples / max(figure["wall_s"] for figure in of_ranks))
        figures[f"cpu_s3_{ranks}"].append(1000 * cpu / samples)
        if ranks > 1:
            figures["rss_s3_fast"].append(running.peak_mib())


def quiet(running: DaemonProcess, url: str, shape: Shape, figures: FigureSamples) -> None:
    """Measure the latency and the cost of a daemon that serves one process."""
    key, ranges = shape.read(0)
    figures["mmap"].append(mapped_ratio(running, url, shape))
    with running.connect() as sidecar:
        figures["open"].append(open_p50(sidecar, url, key, ranges[0]))
        figures["looked"].append(100 * sidecar.spin.helped / OPENS)
    figures["bare"].append(bare_p50())
    time.sleep(6.0)  # the daemon's threads release their buffers
    before = running.thread_seconds()
    time.sleep(IDLE_SECONDS)
    figures["idle"].append(100 * (running.thread_seconds() - before) / IDLE_SECONDS)
    figures["rss"].append(running.rss_mib())
    with many_clients(running) as answered, running.connect() as sidecar:
        figures["clients"].append(answered)
        figures["open_among"].append(open_p50(sidecar, url, key, ranges[0]))


def cold(folder: Path, root: Path, figures: FigureSamples) -> None:
    """Let four ranks read an uncached dataset from a server of a fixed bandwidth, without and with a daemon."""
    with server(root, RATE) as limited:
        jobs = [RankJob("s3://bucket/ds", None, LIMITED, rank=rank, ranks=4) for rank in range(4)]
        without, _ = run_ranks(jobs, limited.environ)
    with server(root, RATE) as limited, daemon(folder / "cold", limited.environ, cache_bytes="1GiB") as running:
        # warm up: a real daemon has already read from its stores
        run_ranks([RankJob("s3://bucket/other", str(running.socket), Shape(shards=1, per_shard=1))], limited.environ)
        jobs = [RankJob("s3://bucket/ds", str(running.socket), LIMITED, rank=rank, ranks=4) for rank in range(4)]
        through, _ = run_ranks(jobs, limited.environ)
        figures["rss_s3"].append(running.peak_mib())
    figures["cold"].append(without / through)


# the parts


def open_p50(sidecar: Sidecar, url: str, key: str, byte_range: tuple[int, int]) -> float:
    """Return the median microseconds of a round trip for a cached range of a file that is already open."""
    where, file, times = m.Where(url, {}), 0, list[float]()
    for _ in range(OPENS):
        message = (where, key, [byte_range], 30.0, file)
        began = time.perf_counter()
        answer, descriptors = sidecar.call(lambda id, message=message: m.Open(id, *message))  # type: ignore[misc]
        times.append(time.perf_counter() - began)
        wire.close_all(descriptors)
        if isinstance(answer, m.Opened):
            file = answer.file
    return statistics.median(times[OPENS // 10 :]) * 1e6


def bare_p50() -> float:
    """Return the lower bound: the median microseconds of a round trip of a hundred bytes to a thread."""
    ours, theirs = socket.socketpair()

    def echo() -> None:
        while data := theirs.recv(4096):
            theirs.send(data)

    thread = threading.Thread(target=echo)
    thread.start()
    times = []
    for _ in range(OPENS):
        began = time.perf_counter()
        ours.send(bytes(100))
        ours.recv(4096)
        times.append(time.perf_counter() - began)
    ours.close()
    thread.join()
    theirs.close()
    return statistics.median(times) * 1e6


def mapped_ratio(running: DaemonProcess, url: str, shape: Shape) -> float:
    """Return the throughput of the sidecar's cache, divided by that of plain mappings of the same files.

    A mapping of another copy would differ by more than the overhead, because its pages are at other places in memory.
    The whole dataset is read, so that the processor's caches cannot hold it.
    """
    staging = memoryview(bytearray(shape.sample_bytes))
    reads = [shape.read(sample) for sample in range(shape.samples)]
    with (
        contextlib.closing(open_store(url)) as store,
        contextlib.closing(open_reader(store, running.socket)) as reader,
        running.connect() as sidecar,
    ):
        where = m.where(store.location)
        plain = {key: mapped_file(sidecar, where, key, shape.shard_bytes) for key in {key for key, _ in reads}}

        def through() -> None:
            for key, ranges in reads:
                copy(staging, reader.read(key, ranges))

        def directly() -> None:
            for key, ranges in reads:
                copy(staging, [plain[key][offset : offset + length] for offset, length in ranges])

        for action in (through, directly, through, directly):  # warm up: pages and blocks
            action()
        timings = [(seconds(directly), seconds(through)) for _ in range(9)]
    return statistics.median(a for a, _ in timings) / statistics.median(b for _, b in timings)


def mapped_file(sidecar: Sidecar, where: m.Where, key: str, size: int) -> memoryview:
    """Wait until the daemon's cache has the whole object, and return a plain mapping of its file."""
    _, descriptors = sidecar.call(lambda id: m.Open(id, where, key, [(0, size)], 30.0))
    try:
        return memoryview(mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ))
    finally:
        wire.close_all(descriptors)


def copy(staging: memoryview, views: list[memoryview]) -> None:
    at = 0
    for view in views:
        staging[at : at + len(view)] = view
        at += len(view)


def seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@contextlib.contextmanager
def many_clients(running: DaemonProcess) -> Iterator[int]:
    """Connect a thousand clients, each of which sends Hello, and yield the number of responses."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_connect_client(running.socket)) for _ in range(CLIENTS)]
        yield sum(_is_welcomed(sock) for sock in sockets)


def _connect_client(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    sock.settimeout(30)
    sock.sendall(wire.frame(m.encode(m.Hello(m.VERSION, 1))))
    return sock


def _is_welcomed(sock: socket.socket) -> bool:
    data, _ = wire.receive(sock)
    return isinstance(m.decode_from_daemon(wire.Framer().feed(data)[0].payload), m.Welcome)


def warm_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.tar"):
        path.read_bytes()


BATCH = 16
BLOCK_BYTES = 4 << 20
SETTLE_SECONDS, SMALL_BYTES = 2.5, 64 << 20


class Memory:
    """Holds `size` bytes of used pages, until `free` makes them available to the next writer.

    A kernel that returns free pages to its host does so two seconds after they became free. So `free` first waits until
    the kernel has returned the pages that became free earlier.
    """

    def __init__(self, folder: Path, size: int) -> None:
        piece = bytes(4 << 20)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # `free` closes it
        for _ in range(0, size, len(piece)):
            self._file.write(piece)
        self._size = size

    def free(self) -> None:
        if self._size > SMALL_BYTES:
            time.sleep(SETTLE_SECONDS)
        self._file.close()


def single_pass(data: Path, folder: Path, shape: Shape) -> tuple[float, float]:
    """Measure the lower bound of a first epoch.

    Returns: The seconds to read, digest and write all shards of `data` block by block, and the CPU seconds. The CPU
        seconds include one copy, sample by sample, out of mappings of the written files.
    """
    Memory(folder, shape.total_bytes).free()
    buffer, staging = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BATCH * shape.sample_bytes))
    staging[::4096] = bytes(len(staging[::4096]))
    copy_seconds, began = 0.0, time.process_time()
    for path in data.rglob("*.tar"):
        with tempfile.TemporaryFile(dir=folder, buffering=0) as target:
            start = time.perf_counter()
            _copy_hashed(path, target, buffer)
            copy_seconds += time.perf_counter() - start
            mapped = memoryview(mmap.mmap(target.fileno(), 0, prot=mmap.PROT_READ))
            for at in range(0, len(mapped), shape.sample_bytes):
                place = at % len(staging)
                staging[place : place + shape.sample_bytes] = mapped[at : at + shape.sample_bytes]
    return copy_seconds, time.process_time() - began


def _copy_hashed(path: Path, target: IO[bytes], buffer: memoryview) -> None:
    with path.open("rb", buffering=0) as source:
        while size := source.readinto(buffer):
            xxhash.xxh3_64_intdigest(buffer[:size])
            target.write(buffer[:size])
