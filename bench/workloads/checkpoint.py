"""`headrace bench checkpoint`: measures saves and restores of checkpoints.

The figures are the stall and the slow-down of the trainer, the time until a save is durable, the bytes written, and the
time of a restore. Every candidate runs in its own process (`checkpoint_worker`), on a disk, on tmpfs or against an S3
server on loopback, with one rank or several. `headrace.bench.peers.checkpointers` builds the candidates. This module
imports no large package.

Invariant: every candidate saves the same bytes, and a save counts as durable only when it is fsynced. A candidate fails
if a restored state differs in any bit from the state at the time of the save.

Failure behaviour: a candidate that fails is named with the end of its error, and the others continue.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.processes import environment_variables
from headrace.bench.core.report import part_table
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB, parse_bytes

_SIZE = os.environ.get("HEADRACE_BENCH_CHECKPOINT_MIB", "256") + "MiB"
_SECONDS = 600.0
METRICS = {
    "state_mib": Metric("state MiB", "MiB"),
    "copy_s": Metric("one copy in memory s", "s"),
    "first_stall_s": Metric("first: stall s", "s"),
    "first_durable_s": Metric("durable s", "s", group="first save"),
    "first_mib": Metric("written MiB", "MiB", group="first save"),
    "step_stall_s": Metric("after a step: stall s", "s"),
    "step_waited_s": Metric("of which later s", "s", group="after a step"),
    "step_durable_s": Metric("durable s", "s", group="after a step"),
    "step_mib": Metric("written MiB", "MiB", group="after a step"),
    "slow_down": Metric("steps during the save, by quiet ones", ""),
    "extra_mib": Metric("extra memory MiB", "MiB"),
    "later_mib": Metric("after many steps: written MiB", "MiB"),
    "frozen_durable_s": Metric("90 % frozen: durable s", "s"),
    "frozen_mib": Metric("written MiB", "MiB", group="90 % frozen"),
    "lora_durable_s": Metric("LoRA: durable s", "s"),
    "lora_mib": Metric("written MiB", "MiB", group="LoRA"),
    "restore_cold_s": Metric("restore, cold s", "s"),
    "restore_s": Metric("warm s", "s", group="restore"),
    "restore_other_s": Metric("to another topology s", "s", group="restore"),
    "cpu_s": Metric("CPU s", "s"),
    "peak_mib": Metric("peak MiB", "MiB"),
}


PLACES = ("disk", "tmpfs", "s3")
OURS = "headrace"


@dataclass(frozen=True)
class Entry:
    """A candidate. `build` names a function of `headrace.bench.peers.checkpointers`.

    It is called as `function(where, training, **options)`.
    """

    build: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    places: tuple[str, ...] = ("disk", "tmpfs")
    ranks: bool = False
    """Whether the candidate supports several ranks."""


ENTRIES: dict[str, Entry] = {
    OURS: Entry("headrace", places=PLACES, ranks=True),
    "headrace, lazy": Entry("headrace", {"staging": "lazy"}, places=PLACES, ranks=True),
    "headrace, auto compression": Entry("headrace", {"compression": "auto"}, places=PLACES, ranks=True),
    "headrace, sidecar on another core": Entry("with_sidecar"),
    "floor: memcpy, O_DIRECT, BLAKE3": Entry("floor"),
    "torch.save": Entry("torch_save"),
    "safetensors": Entry("safetensors", needs=("safetensors",)),
    "dcp.save": Entry("dcp", {"kind": "sync"}, ranks=True),
    "dcp.async_save": Entry("dcp", {"kind": "thread"}, ranks=True),
    "dcp.async_save, stager": Entry("dcp", {"kind": "stager"}, ranks=True),
    "dcp.async_save, process": Entry("dcp", {"kind": "process"}, ranks=True),
    "torch_checkpointing": Entry("torch_checkpointing", needs=("torch_checkpointing",)),
    "s3torchconnector's dcp": Entry(
        "s3torchconnector", needs=("s3torchconnector", "tenacity"), places=("s3",), ranks=True
    ),
    "dcp.save, fsspec": Entry("dcp_fsspec", needs=("s3fs",), places=("s3",), ranks=True),
}
SHORT = (
    *(OURS, "headrace, lazy", "floor: memcpy, O_DIRECT, BLAKE3", "torch.save", "safetensors"),
    *("dcp.save", "dcp.async_save", "dcp.async_save, stager", "s3torchconnector's dcp"),
)
"""The candidates that `make bench` runs."""


def reason_against(entry: Entry, place: str, ranks: int) -> str | None:
    """Return the reason why the candidate cannot run here, or None if it can."""
    if place not in entry.places:
        return f"saves to {' and '.join(entry.places)} only"
    if ranks > 1 and not entry.ranks:
        return "does not support several ranks"
    missing = [name for name in entry.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def show(part: Part) -> str:
    """Return one table for each place."""
    places = part.settings.get("on", [])
    if len(places) < 2:
        return part_table(part, _shown(part))
    texts = []
    for place in places:
        of_place = {n.removeprefix(f"{place}: "): s for n, s in part.candidates.items() if n.startswith(f"{place}: ")}
        part_of_place = Part(part.name, metrics=part.metrics, candidates=of_place, against="dcp.async_save")
        texts.append(f"### {place}\n\n{part_table(part_of_place, _shown(part_of_place))}")
    more = [f"\n**{part.status}**: {part.why}"] if part.status != "done" else []
    return "\n\n".join([*texts, *more])


def _shown(part: Part) -> list[str]:
    """Return the metrics that at least one candidate has."""
    return [name for name in part.metrics if any(name in found.metrics for found in part.candidates.values())]


@benchmark(
    "checkpoint",
    "Saves and restores, compared with torch.save, safetensors, torch.distributed.checkpoint and others.",
    argument("--size", default=_SIZE, help="state, about (default: %(default)s)"),
    argument("--tensors", type=positive_int, default=0, help="instead, this many tensors of 1 KiB, with one rank"),
    argument("--ranks", type=positive_int, default=1, help="processes, by FSDP2 over gloo (default: %(default)s)"),
    argument("--on", default="disk", help=f"of {', '.join(PLACES)}; several by commas (default: %(default)s)"),
    argument(
        "--streaming-copies",
        action="store_true",
        help="start every candidate with the setting of glibc that `headrace doctor --memory` advises",
    ),
    argument("--only", nargs="+", choices=list(ENTRIES), help="these candidates", metavar="NAME"),
    argument("--all", action="store_true", help="every candidate that is installed, not the usual ones only"),
    argument("--steps", type=int, default=0, help="also save after this many steps"),
    argument("--lora", action="store_true", help="also a LoRA run: frozen weights, small adapters that train"),
    show=show,
)
def checkpoint(job: Job, part: Part) -> None:
    """Measure all candidates in each place. Every candidate saves and restores the same state."""
    args = job.args
    places, mib = _places(args.on), parse_bytes(args.size) // MIB
    if mib < 8:
        raise UsageError("there must be at least 8 MiB of state", hint="give --size 64MiB or more")
    if args.tensors and (args.ranks > 1 or args.lora):
        raise UsageError("--tensors is for one rank without LoRA", hint="leave out --ranks and --lora")
    chosen = args.only or (list(ENTRIES) if args.all else list(SHORT))
    missing: dict[str, str] = {}
    ranks = f", {args.ranks} ranks" if args.ranks > 1 else ""
    what = f"{args.tensors} tensors of 1 KiB" if args.tensors else f"about {mib} MiB of training state"
    part.title = f"Checkpoint: {what}{ranks}"
    part.settings = {"mib": mib, "ranks": args.ranks, "tensors": args.tensors, "on": places, "missing": missing}
    part.against = "dcp.async_save" if len(places) == 1 else f"{places[0]}: dcp.async_save"
    part.metrics = METRICS
    candidates: list[Candidate] = []
    with contextlib.ExitStack() as stack:
        part.settings["glibc_tunables"] = stack.enter_context(glibc_tunables(streaming=args.streaming_copies))
        for place in places:
            where = stack.enter_context(_place(place, job.scratch))
            for name in chosen:
                label = name if len(places) == 1 else f"{place}: {name}"
                if (why := reason_against(ENTRIES[name], place, args.ranks)) is not None:
                    missing[f"{place}: {name}"] = why
                    continue
                function = "headrace.bench.workloads.checkpoint_worker:measure_in_process"
                candidates.append(
                    Candidate(label, function, (name, where, mib, args.ranks, args.steps, args.lora, args.tensors))
                )
        alternate(candidates, job.rounds, job.progress, part.candidates, seconds=_SECONDS)
    part.notes = [f"left out: {name} ({why})" for name, why in missing.items()] if args.all else []


@contextlib.contextmanager
def glibc_tunables(*, streaming: bool) -> Iterator[str]:
    """Set glibc's tunables for the processes of all candidates, and yield the value."""
    from headrace.checkpoint.saving import copy_threads

    values = copy_threads.streaming(os.environ.copy()) if streaming else {}
    with environment_variables(values):
        yield os.environ.get(copy_threads.VARIABLE, "")


def _places(text: str) -> list[str]:
    places = text.split(",")
    if unknown := [name for name in places if name not in PLACES]:
        raise UsageError(f"no place {unknown[0]!r} to save to", hint=f"there are: {', '.join(PLACES)}")
    return places


@contextlib.contextmanager
def _place(name: str, scratch: Path) -> Iterator[str]:
    """Yield an empty place to save to: a path or the URL of a bucket."""
    if name == "disk":
        yield str(scratch / "checkpoints")
    elif name == "tmpfs":
        with tempfile.TemporaryDirectory(prefix="mrb-", dir="/dev/shm") as folder:
            yield f"{folder}/checkpoints"
    else:
        from headrace.dataio.testing.s3_server import start_seaweedfs

        with start_seaweedfs() as server:
            os.environ.update(server.environment())
            yield server.create_bucket("checkpoints")
