"""`headrace bench publish`: new weights for a subscriber, compared with safetensors files.

The weights are bf16 tensors. From version to version, a share of the elements changes by one or two units in the last
place, as in reinforcement learning. The time of a candidate is that from the committed step, or from the weights in
memory, to the changed tensors of another consumer on the same machine.

- Headrace publishes a step, and a subscriber applies the update. All blocks are verified. The step is published by the
  handle of its save, right after `save` has returned, or by its number, once it is committed.
- safetensors writes all weights to a file, reads them, and copies them into the tensors. It compares no digest.
- *Stall* is the time in which the tensors change. Its lower bound is a copy of the changed elements to their places
  (*copy of changes*), by as many threads. *Copy* is a copy of all weights in memory.

With `--adamw`, a small transformer takes AdamW steps instead (`publish_adamw`).

Invariant: after each candidate, the tensors hold the new weights.
Failure behaviour: a candidate that fails is named, and the others continue.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, alternate, cpu_seconds
from headrace.bench.core.results import Metric, Part
from headrace.bench.workloads import publish_adamw
from headrace.bench.workloads.loader import installed
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.limits import MIB

TENSORS = 16
HEADRACE, BY_NUMBER, SAFETENSORS = "publish and apply", "publish and apply, by number", "safetensors, all weights"
METRICS = {
    "seconds": Metric("s", "s", "lower"),
    "from_save_s": Metric("from the save s", "s", "lower"),
    "cpu_s": Metric("CPU s from the save", "s", "lower"),
    "publish_s": Metric("publish s", "s", "lower"),
    "prepare_s": Metric("fetch and verify s", "s", "lower"),
    "stall_s": Metric("stall s", "s", "lower"),
    "change_s": Metric("copy of changes s", "s", "lower"),
    "copy_s": Metric("copy s", "s", "lower"),
    "published": Metric("of the bytes published", "", "lower"),
    "fetched": Metric("of the bytes fetched", "", "lower"),
}


@benchmark(
    "publish",
    "New weights for a subscriber, compared with safetensors files.",
    argument("--mib", type=positive_int, default=1024, help="MiB of bf16 weights (default: %(default)s)"),
    argument("--changed", type=float, default=0.02, help="share of the elements that change (default: %(default)s)"),
    argument("--adamw", action="store_true", help="publish after AdamW steps of a small transformer, by learning rate"),
)
def publish(job: Job, part: Part) -> None:
    """Measure all candidates in turn."""
    args = job.args
    if args.adamw:
        publish_adamw.fill(job, part)
        return
    part.title = f"{args.mib} MiB of bf16 weights, {args.changed:.1%} of the elements change"
    part.settings = {"mib": args.mib, "changed": args.changed, "tensors": TENSORS}
    part.metrics, part.against = METRICS, SAFETENSORS
    names = [HEADRACE, BY_NUMBER, SAFETENSORS] if installed("safetensors") else [HEADRACE, BY_NUMBER]
    candidates = [
        Candidate(
            name, "headrace.bench.workloads.publish:measure", (name, str(job.scratch / str(n)), args.mib, args.changed)
        )
        for n, name in enumerate(names)
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)


def _weights(mib: int) -> dict[str, Any]:
    """Random weights. Those of one tensor, scaled, are those of the next: random numbers take longer than all else."""
    import torch

    torch.manual_seed(0)
    rows = mib * MIB // TENSORS // 2 // 1024
    drawn = torch.randn(rows, 1024) * 0.02
    return {f"layer_{n}": (drawn * (1 + n / TENSORS)).bfloat16() for n in range(TENSORS)}


def _change(weights: dict[str, Any], share: float) -> None:
    """Change a share of the elements by one or two units in the last place. Few are drawn twice, and change once."""
    import torch

    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1)
        chosen = torch.randint(len(bits), (int(len(bits) * -math.log1p(-share)),))
        bits[chosen] += torch.randint(1, 3, chosen.shape, dtype=torch.int16)


def measure(name: str, folder: str, mib: int, changed: float) -> dict[str, float]:
    """Measure one candidate, from its second version on."""
    import shutil

    import torch

    torch.set_num_threads(1)
    weights = _weights(mib)
    held = {key: torch.empty_like(value) for key, value in weights.items()}
    Path(folder).mkdir(exist_ok=True)
    try:
        if name == SAFETENSORS:
            figures = _safetensors(Path(folder), weights, held, changed)
        else:
            figures = _headrace(Path(folder), weights, held, changed, by_number=name == BY_NUMBER)
    finally:
        shutil.rmtree(folder)
    if not all(torch.equal(held[key], value) for key, value in weights.items()):
        raise AssertionError(f"{name} delivered other weights")
    return figures


def _headrace(
    folder: Path, weights: dict[str, Any], held: dict[str, Any], changed: float, *, by_number: bool
) -> dict[str, float]:
    from headrace.checkpoint import Checkpointer, Subscriber

    nbytes = sum(value.nbytes for value in weights.values())
    with (
        Checkpointer(folder, run="r", sidecar=None) as checkpointer,
        Subscriber(folder, "policy", sidecar=None) as subscriber,
    ):
        for step in (1, 2):
            if step == 2:
                _change(weights, changed)
                before = {key: value.clone() for key, value in held.items()}
            saved, cpu = time.perf_counter(), cpu_seconds()
            handle = checkpointer.save(step, {"model": weights})
            future = None if by_number else checkpointer.publish("policy", handle)
            handle.result()
            began = time.perf_counter()
            future = future or checkpointer.publish("policy", step)
            assert future is not None
            record = future.result()
            published = time.perf_counter()
            version = subscriber.wait(60)
            prepared = version.prepare(held)
            ready = time.perf_counter()
            prepared.commit()
            end, cpu = time.perf_counter(), cpu_seconds() - cpu
    assert record.update is not None
    change_s = _copy_changes(before, held)
    began_copy = time.perf_counter()
    for key, value in held.items():
        before[key].copy_(value)
    copy_s = time.perf_counter() - began_copy
    return {
        "seconds": end - began,
        "from_save_s": end - saved,
        "cpu_s": cpu,
        "publish_s": published - began,
        "prepare_s": ready - published,
        "stall_s": end - ready,
        "change_s": change_s,
        "copy_s": copy_s,
        "published": (record.update.size + record.weights.size) / nbytes,
        "fetched": version.bytes_to_fetch / nbytes,
    }


def _copy_changes(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return the seconds in which the changed elements, already gathered, are copied to their places."""
    import torch

    writes = []
    for key, value in after.items():
        old, new = (tensor.view(torch.int16).view(-1) for tensor in (before[key], value))
        where = (old != new).nonzero().view(-1)
        writes.append((old, where, new[where]))
    began = time.perf_counter()
    for old, where, values in writes:
        old.scatter_(0, where, values)
    return time.perf_counter() - began


def _safetensors(folder: Path, weights: dict[str, Any], held: dict[str, Any], changed: float) -> dict[str, float]:
    from safetensors.torch import load_file, save_file

    _change(weights, changed)
    began, cpu = time.perf_counter(), cpu_seconds()
    save_file(weights, folder / "weights.safetensors")
    published = time.perf_counter()
    loaded = load_file(folder / "weights.safetensors")
    ready = time.perf_counter()
    for key, value in loaded.items():
        held[key].copy_(value)
    end, cpu = time.perf_counter(), cpu_seconds() - cpu
    return {
        "seconds": end - began,
        "from_save_s": end - began,
        "cpu_s": cpu,
        "publish_s": published - began,
        "prepare_s": ready - published,
        "stall_s": end - ready,
        "published": 1.0,
        "fetched": 1.0,
    }
