"""`headrace bench llm-checkpoint`: writing and reading checkpoints with the sizes of the rules' models, scaled; unofficial.

How: each process holds its share of the state (`--fraction` of the published size over the published number of processes,
model, master weights and both moments), all save at once, and count as done when everything is fsynced; the page cache is
dropped; all restore. As in the rules a duration is the slowest process's, and everything is done five times. With fewer
processes than the rules have this is their "subset".
Invariant: restored tensors equal the saved ones to the bit, or the candidate fails. Failure behaviour: as for all
benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from headrace.bench.core import command, floor
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part
from headrace.bench.mlperf.workloads import SHARES, model
from headrace.dataio.core.options import amount, count

CANDIDATES = ("headrace", "torch.save, a file a process")
METRICS = {
    "write_s": Metric("write s", "s"),
    "write": Metric("write GB/s", "GB/s", "higher"),
    "stall_s": Metric("trainer held s", "s"),
    "read_s": Metric("read s", "s"),
    "read": Metric("read GB/s", "GB/s", "higher"),
    "cpu_s": Metric("CPU s", "s"),
    "peak_mib": Metric("peak MiB a process", "MiB"),
}
_WAIT = 200.0


def main(argv: Sequence[str]) -> int:
    """Run it, or one candidate, or one rank of that; the exit code."""
    if argv[:1] == ["--candidate"]:
        print(json.dumps(_candidate(argv[1], Path(argv[2]), int(argv[3]), int(argv[4]))))
        return 0
    if argv[:1] == ["--rank"]:
        print(json.dumps(_rank(argv[1], Path(argv[2]), int(argv[3]), int(argv[4]), int(argv[5]))))
        return 0
    return command.run(argv, "llm-checkpoint", __doc__ or "", fill, _options, rounds=5)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="8b", help="8b, 70b, 405b or 1t (default: %(default)s)")
    parser.add_argument("--fraction", type=amount, default=0.01, help="of a process's share (default: %(default)s)")
    parser.add_argument(
        "--processes", type=count, default=2, help="default: %(default)s; by the rules 8, 64, 512, 1024"
    )


def fill(job: command.Job, part: Part) -> None:
    """Both candidates, alternating, in one folder each."""
    args, chosen = job.args, model(job.args.model)
    share = int(chosen.checkpoint_bytes / chosen.processes * args.fraction)
    part.title = f"Checkpoint of {args.model}: {share / 1e6:.0f} MB on each of {args.processes} processes (unofficial)"
    part.settings = {"model": args.model, "fraction": args.fraction, "processes": args.processes, "bytes": share}
    part.metrics, part.against = _limited(job.scratch), CANDIDATES[1]
    part.notes = [
        "Unofficial: in the shape of MLPerf Storage's checkpoint workload, not verified by MLCommons, not comparable with "
        "published results."
    ]
    folder = str(job.scratch)
    wanted = [
        Candidate(name, "headrace.bench.mlperf.states", ("--candidate", name, folder, str(share), str(args.processes)))
        for name in CANDIDATES
    ]
    alternate(wanted, job.rounds, job.tell, part.candidates)


def _limited(folder: Path) -> dict[str, Metric]:
    """The metrics, with what the disk allows beside its rates."""
    disk = {"write": floor.write_rate(folder), "read": floor.read_rate(folder)}
    limits = {
        name: structs.replace(METRICS[name], limit=found.rate / 1e9, limit_why=found.why)
        for name, found in disk.items()
    }
    return METRICS | limits


def _candidate(name: str, folder: Path, share: int, processes: int) -> dict[str, float]:
    """Start all ranks; durations of the slowest."""
    place = folder / name.split(",")[0].replace(".", "-")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    base = [sys.executable, "-m", "headrace.bench.mlperf.states", "--rank", name, str(place), str(share)]
    ranks = [
        subprocess.Popen([*base, str(rank), str(processes)], stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=_WAIT)[0].strip().splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    out = {key: max(one[key] for one in found) for key in ("write_s", "stall_s", "read_s", "peak_mib")}
    out |= {way: share * processes / 1e9 / out[f"{way}_s"] for way in ("write", "read")}
    return out | {"cpu_s": sum(one["cpu_s"] for one in found)}


def _rank(name: str, place: Path, share: int, rank: int, processes: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from headrace.bench.core.measure import Meter

    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "rendezvous"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    values = state(share, rank)
    save, restore, close = _BUILD[name](place, rank)
    dist.barrier()
    meter, began = Meter(), time.perf_counter()
    wait = save(values)
    out = {"stall_s": time.perf_counter() - began}
    wait()
    out["write_s"] = time.perf_counter() - began
    dist.barrier()
    if rank == 0:
        _drop(place)
    target = {key: torch.zeros_like(value) for key, value in values.items()}
    dist.barrier()
    began = time.perf_counter()
    restore(target)
    out["read_s"] = time.perf_counter() - began
    if not all(torch.equal(values[key], target[key]) for key in values):
        raise AssertionError(f"rank {rank} restored something else")
    close()
    dist.barrier()
    dist.destroy_process_group()
    read = meter.read()
    return out | {"cpu_s": read["cpu_s"], "peak_mib": read["peak_mib"]}


def state(share: int, rank: int) -> dict[str, Any]:
    """This process's tensors: eight layers of fp16 weights, fp32 master weights and two moments, `share` bytes in all."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    found = {}
    for kind, part in SHARES.items():
        dtype = torch.float16 if kind == "model" else torch.float32
        count = max(1, int(share * part / 8 / dtype.itemsize))
        for layer in range(8):
            found[f"{kind}.{layer}"] = torch.randn(count, generator=generator).to(dtype)
    return found


Built = tuple[Callable[[Any], Callable[[], object]], Callable[[Any], object], Callable[[], None]]


def _headrace(place: Path, rank: int) -> Built:
    from headrace.checkpoint import Checkpointer

    checkpointer = Checkpointer(str(place / "repository"), run="llm", sidecar=None)

    def save(values: Any) -> Callable[[], object]:
        handle = checkpointer.save(1, {"shard": values})
        return lambda: handle.result(_WAIT)

    return save, lambda target: checkpointer.restore({"shard": target}), checkpointer.close


def _torch_save(place: Path, rank: int) -> Built:
    import torch

    path = place / f"{rank}.pt"

    def save(values: Any) -> Callable[[], object]:
        with path.open("wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def restore(target: Any) -> None:
        for key, value in torch.load(path, weights_only=True).items():
            target[key].copy_(value)

    return save, restore, lambda: None


_BUILD: dict[str, Callable[[Path, int], Built]] = {CANDIDATES[0]: _headrace, CANDIDATES[1]: _torch_save}


def _drop(place: Path) -> None:
    """Have the kernel forget what it has of these files."""
    for path in place.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
