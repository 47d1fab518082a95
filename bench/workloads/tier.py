"""`headrace bench tier`: restoring one step from the node's tier (in memory and on disk), from the buddy node, and from
a store.

Each candidate is a trainer in its own process that restores the same committed step. The daemons, the S3 server and the
proxy that limits its bandwidth are real and on loopback.
Invariant: a restore fails if its bytes differ from the saved ones, or if a tier's bytes came from the store in part.
Failure behaviour: as in `headrace.bench.core.command`. Without openssl or `deploy/` there are no certificates, so the
buddy is left out, and a line on standard error says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.bench.core import command
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.processes import daemon
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import positive_int
from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.core.limits import MIB, parse_bytes
from headrace.dataio.testing.fault_proxy import FaultProxy
from headrace.dataio.testing.s3_server import start_seaweedfs

CERTIFICATES = Path(__file__).resolve().parents[2] / "deploy" / "buddies" / "certificates.sh"
URL = "s3://headrace/bench"
METRICS = {
    "restore": Metric("restore", "s"),
    "rate": Metric("rate", "MB/s", "higher"),
    "cpu": Metric("CPU of the trainer", "s"),
}


def main(argv: Sequence[str]) -> int:
    """Run `headrace bench tier` and return the exit code."""
    return command.run(argv, "tier", "Restoring from the tier, the buddy and the store.", fill, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=positive_int, default=256, help="state that is restored (default: %(default)s)")
    parser.add_argument("--store-rate", default="200MB", help="bytes a second of the store (default: %(default)s)")


def fill(job: command.Job, part: Part) -> None:
    """Save one step, put it into all places, and restore it from each place in turn."""
    rate = parse_bytes(job.args.store_rate)
    part.title, part.metrics = "Restoring a step, by where it is", METRICS
    part.settings = {"state MiB": job.args.mib, "store MB/s": rate // 10**6}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start_seaweedfs())
        server.create_bucket("headrace")
        relay = stack.enter_context(FaultProxy(server.endpoint, answers=rate))
        os.environ.update(server.environment())
        places = _places(job, stack, relay)
        candidates = [
            Candidate(name, "headrace.bench.workloads.tier", (URL, str(job.args.mib), *arguments))
            for name, arguments in places.items()
        ]
        alternate(candidates, job.rounds, job.tell, part.candidates)


def _places(job: command.Job, stack: contextlib.ExitStack, relay: FaultProxy) -> dict[str, tuple[str, ...]]:
    """Put the step into all places. Return the candidates by name, with their arguments for `restore`."""
    memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mrb-", dir="/dev/shm")))
    disk = job.scratch / "disk"
    tls = _certificates(job.scratch / "tls")
    there = f"127.0.0.2:{_free_port('127.0.0.2')}"
    listening = {"buddy_listen": there, "buddy_names": "127.0.0.1", **_files(tls, "127.0.0.2")} if tls else {}
    first = _daemon(stack, memory, listening)
    _save(first, job.args.mib)
    os.environ["AWS_ENDPOINT_URL"] = relay.endpoint
    shutil.copytree(memory / "tier", disk / "tier", ignore=shutil.ignore_patterns("lock", "sending"))
    os.chmod(disk / "tier", 0o700)
    places = {
        "tier in memory": (first, "tier"),
        "tier on disk, cold": (_daemon(stack, disk, {}), "tier", str(disk / "tier")),
    }
    if tls:
        empty = job.scratch / "new"
        node = _daemon(stack, empty, {"buddy": there, **_files(tls, "127.0.0.1")})
        places["buddy"] = (node, "buddy", str(empty / "tier"))
    return places | {f"S3 at {job.args.store_rate}/s": ("none", "store")}


def _daemon(stack: contextlib.ExitStack, folder: Path, more: dict[str, str]) -> str:
    """Start a daemon with a tier in `folder`/tier, and return its socket."""
    short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mrb-")))
    tier = {"tier_dir": str(folder / "tier"), "tier_bytes": "16GiB", "http_port": "off", "cache_bytes": "1MiB"}
    return str(stack.enter_context(daemon(short, None, **tier, **more)).socket)


def _save(socket_path: str, mib: int) -> None:
    from headrace.checkpoint import Checkpointer

    with Checkpointer(URL, run="bench", sidecar=socket_path) as checkpointer:
        result = checkpointer.save(1, {"w": _tensor(mib)}).result(600)
    if result.kept is None:
        raise UnsupportedError("the step was not kept in the tier", hint="is there room in /dev/shm?")


def _tensor(mib: int, seed: int = 1) -> object:
    import torch

    return torch.randint(-(1 << 62), 1 << 62, (mib * MIB // 8,), generator=torch.Generator().manual_seed(seed))


def _certificates(folder: Path) -> Path | None:
    if not CERTIFICATES.is_file() or shutil.which("openssl") is None:
        print("no openssl, or no deploy/: the buddy is left out", file=sys.stderr)
        return None
    subprocess.run([CERTIFICATES, folder, "127.0.0.1", "127.0.0.2"], check=True, capture_output=True, timeout=60)
    return folder


def _files(tls: Path, node: str) -> dict[str, str]:
    return {"tls_cert": f"{tls}/{node}.pem", "tls_key": f"{tls}/{node}.key", "tls_ca": f"{tls}/ca.pem"}


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def restore(url: str, mib: int, sidecar: str, where: str, tier: str = "") -> Iterator[tuple[str, float]]:
    """Restore once, as a starting trainer does, and yield the figures by name."""
    import torch

    from headrace.checkpoint import Checkpointer
    from headrace.dataio.core.metrics import tier_read_bytes

    _prepare(Path(tier) if tier else None, where)
    state = {"w": torch.zeros(mib * MIB // 8, dtype=torch.int64)}
    with Checkpointer(url, run="bench", sidecar=None if sidecar == "none" else sidecar) as checkpointer:
        cpu, began = time.process_time(), time.perf_counter()
        step = checkpointer.restore(state)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if step != 1 or not torch.equal(state["w"], _tensor(mib)):  # type: ignore[arg-type]
        raise UsageError("what was restored is not what was saved")
    near = ("tier", "buddy") if where == "buddy" else (where,)  # prefetched bytes are in the tier already
    if where != "store" and sum(tier_read_bytes.labels(name)._value.get() for name in near) < mib * MIB:
        raise UsageError(f"not all came from the {where}")
    yield from {"restore": seconds, "rate": mib * MIB / seconds / 1e6, "cpu": cpu}.items()


def _prepare(tier: Path | None, where: str) -> None:
    """Empty the tier for the buddy's candidate. For the disk's candidate, drop the tier's files from the page cache."""
    for path in [p for name in ("objects", "records") for p in (tier / name).iterdir()] if tier is not None else []:
        if where == "buddy":
            path.unlink()
            continue
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    print(json.dumps(dict(restore(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))))
