"""`headrace bench simulate`: a model of reads, saves and failures on 8 to 16,384 GPUs.

It computes (`cluster_model`), with and without the sidecar, deduplication and the local tier:

- read amplification and waits for data;
- stall and duration of a checkpoint;
- its best interval (by Young, by Daly, and by trying intervals);
- goodput.

With `--control-plane` it runs code instead of a model (`headrace.bench.control_plane.figures`).

Invariants: every setting is in the results. The command measures nothing; measured numbers are set with `--set`.

Failure behaviour: an unknown setting is a `UsageError` that lists the known ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from headrace.bench.core import command
from headrace.bench.core.report import part_table, short
from headrace.bench.core.results import Better, Metric, Part, Samples
from headrace.bench.workloads.cluster_model import (
    VARIANTS,
    Cluster,
    Features,
    Job,
    best_interval,
    costs,
    daly,
    young,
)
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.errors import UsageError

GPUS = (8, 64, 512, 4096, 16384)
_DAY = 86400.0
_FEWEST_RANKS = 8
_LONGEST_LATENCY = 10.0
"""In seconds."""
_QUANTITIES: dict[str, tuple[str, str, Better]] = {
    "amplification": ("bytes read ÷ bytes needed", "×", "lower"),
    "data_stall": ("waiting for data", "%", "lower"),
    "stall": ("stall of a save", "s", "lower"),
    "durable": ("save durable after", "s", "lower"),
    "restore": ("restore", "s", "lower"),
    "young": ("interval by Young", "s", "higher"),
    "daly": ("interval by Daly", "s", "higher"),
    "best": ("best interval tried", "s", "higher"),
    "goodput": ("goodput", "%", "higher"),
}


def _names() -> list[str]:
    return [field.name for kind in (Cluster, Job) for field in fields(kind) if field.name != "gpus"]


def show(part: Part) -> str:
    """Return one table for each cluster size, or one of the control plane."""
    if "latency_ms" in part.settings:
        return part_table(part)
    lines = []
    for gpus in sorted({int(metric.axes["gpus"]) for metric in part.metrics.values()}):
        titles = " | ".join(f"{title}, {unit}" for title, unit, _ in _QUANTITIES.values())
        lines += [f"### {gpus:,} GPUs", "", f"| | {titles} |", "|---|" + "---|" * len(_QUANTITIES)]
        for name, candidate in part.candidates.items():
            medians = [candidate.metrics.get(f"{quantity}_{gpus}") for quantity in _QUANTITIES]
            cells = " | ".join(short(statistics.median(values)) if values else "–" for values in medians)
            lines.append(f"| {name} | {cells} |")
        lines.append("")
    return "\n".join([*lines, *([f"**{part.status}**: {part.why}"] if part.status != "done" else [])])


@command.benchmark(
    "simulate",
    "From 8 to 16,384 GPUs, with and without the sidecar, deduplication and the local tier: a model, not a measurement.",
    argument("--gpus", default=",".join(map(str, GPUS)), help="default: %(default)s"),
    argument("--set", action="append", default=[], metavar="NAME=VALUE", help=f"one of {', '.join(_names())}"),
    argument(
        "--control-plane",
        action="store_true",
        help="instead, run the code that plans, commits and restores, for a model of 405 billion parameters",
    ),
    argument("--ranks", type=positive_int, default=1024, help="with --control-plane (default: %(default)s)"),
    argument("--latency-ms", type=float, default=20.0, metavar="MS", help="of the store (default: %(default)s)"),
    rounds=5,
    show=show,
)
def simulate(job: command.Job, part: Part) -> None:
    """Compute every cluster size and variant. Each round is one seed."""
    if job.args.control_plane:
        control_plane(job, part)
        return
    cluster, work = _settings(job.args.set)
    sizes = [int(text) for text in job.args.gpus.split(",")]
    if min(sizes) < 1:
        raise UsageError("a cluster has at least one GPU")
    part.title, part.against = "Large clusters: a model, not a measurement", VARIANTS[-1].name
    part.settings = {**asdict(cluster), **asdict(work)}
    part.metrics = {
        f"{name}_{gpus}": Metric(f"{gpus:,} GPUs: {title}", unit, better, quantity=title, axes={"gpus": gpus})
        for name, (title, unit, better) in _QUANTITIES.items()
        for gpus in sizes
    }
    for number, features in enumerate(VARIANTS):
        candidate = part.candidates.setdefault(features.name, Samples())
        for gpus in sizes:
            job.progress(f"{features.name}, {gpus} GPUs", number / len(VARIANTS))
            values = quantities(replace(cluster, gpus=gpus), work, features, range(job.rounds))
            candidate.metrics |= {f"{name}_{gpus}": samples for name, samples in values.items()}


def control_plane(job: command.Job, part: Part) -> None:
    """Run the code of a large job's plans, commits and restores in virtual time."""
    from headrace.bench.control_plane.figures import METRICS, figures

    ranks, latency = job.args.ranks, job.args.latency_ms / 1000
    if not 0 <= latency <= _LONGEST_LATENCY:
        raise UsageError(f"--latency-ms {job.args.latency_ms}: not between 0 and {1000 * _LONGEST_LATENCY:.0f}")
    if ranks < _FEWEST_RANKS:
        raise UsageError(
            f"--ranks {ranks}: the model needs at least {_FEWEST_RANKS}", hint="its manifests are too large"
        )
    if ranks > GPUS[-1]:
        raise UsageError(f"--ranks {ranks}: at most {GPUS[-1]}", hint="larger jobs were not tried")
    part.title = f"Control plane of {ranks:,} ranks, {job.args.latency_ms:g} ms to the store"
    part.metrics = dict(METRICS)
    part.settings = {"ranks": ranks, "latency_ms": job.args.latency_ms}
    computed = figures(ranks, latency, job.progress)
    part.settings |= {"extrapolated": bool(computed.laws), "laws": computed.laws}
    part.candidates["headrace"] = Samples({name: [value] for name, value in computed.values.items()})
    part.notes = [
        f"{name} is extrapolated: {law['law']}, from {law['sizes']} ranks" for name, law in computed.laws.items()
    ]


def quantities(cluster: Cluster, work: Job, features: Features, seeds: range) -> dict[str, list[float]]:
    """Return every quantity of one cluster, with one goodput for each seed."""
    job_costs = costs(cluster, work, features)
    wall = max(30 * _DAY, 20 * job_costs.mtbf)
    best, goodput = best_interval(cluster, job_costs, wall=wall, seeds=seeds)
    cost = job_costs.stall + job_costs.slow_down
    return {
        "amplification": [job_costs.amplification],
        "data_stall": [100 * job_costs.data_stall],
        "stall": [job_costs.stall],
        "durable": [job_costs.durable],
        "restore": [job_costs.restore],
        "young": [young(cost, job_costs.mtbf)],
        "daly": [daly(cost, job_costs.mtbf)],
        "best": [best],
        "goodput": [100 * share for share in goodput],
    }


def _settings(assignments: Sequence[str]) -> tuple[Cluster, Job]:
    values: dict[str, float] = {}
    for text in assignments:
        name, _, value = text.partition("=")
        if name not in _names():
            raise UsageError(f"no setting {name!r}", hint=f"there are {', '.join(_names())}")
        try:
            values[name] = float(value)
        except ValueError:
            raise UsageError(f"{text!r}: {value!r} is not a number") from None
    return _built(Cluster(8), values), _built(Job(), values)


def _built(default: Any, values: dict[str, float]) -> Any:
    kinds = {field.name: type(getattr(default, field.name)) for field in fields(default)}
    return replace(default, **{name: kinds[name](value) for name, value in values.items() if name in kinds})
