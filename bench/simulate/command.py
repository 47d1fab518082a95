"""`headrace bench simulate`: from 8 to 16,384 GPUs, with and without the sidecar, deduplication and the local tier.

It computes read amplification, waits for data, stall and duration of a checkpoint, its best interval (Young, Daly, and
by trying), and goodput.
Invariant: every setting is in the results. Nothing is measured here; measured numbers are set by `--set`.
Failure behaviour: a setting that does not exist is a `UsageError` that names those that do.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from headrace.bench.core import command
from headrace.bench.core.report import short
from headrace.bench.core.results import Better, Metric, Part, Samples
from headrace.bench.simulate.cluster import VARIANTS, Cluster, Features, Job, best_interval, costs, daly, young
from headrace.dataio.core.cli import argument
from headrace.dataio.core.errors import UsageError

GPUS = (8, 64, 512, 4096, 16384)
_DAY = 86400.0
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
    """Return one table for each cluster size."""
    lines = []
    for gpus in sorted({int(metric.axes["gpus"]) for metric in part.metrics.values()}):
        titles = " | ".join(f"{title}, {unit}" for title, unit, _ in _QUANTITIES.values())
        lines += [f"### {gpus:,} GPUs", "", f"| | {titles} |", "|---|" + "---|" * len(_QUANTITIES)]
        for name, found in part.candidates.items():
            medians = [found.metrics.get(f"{quantity}_{gpus}") for quantity in _QUANTITIES]
            cells = " | ".join(short(statistics.median(values)) if values else "–" for values in medians)
            lines.append(f"| {name} | {cells} |")
        lines.append("")
    return "\n".join([*lines, *([f"**{part.status}**: {part.why}"] if part.status != "done" else [])])


@command.benchmark(
    "simulate",
    "From 8 to 16,384 GPUs, with and without the sidecar, deduplication and the local tier: a model, not a measurement.",
    argument("--gpus", default=",".join(map(str, GPUS)), help="default: %(default)s"),
    argument("--set", action="append", default=[], metavar="NAME=VALUE", help=f"one of {', '.join(_names())}"),
    rounds=5,
    show=show,
)
def simulate(job: command.Job, part: Part) -> None:
    """Compute every cluster size and variant. Each round is one seed."""
    cluster, work = _settings(job.args.set)
    sizes = [int(text) for text in job.args.gpus.split(",")]
    if min(sizes) < 1:
        raise UsageError("a cluster has at least one GPU")
    part.title, part.against = "Scale on paper: a model, not a measurement", VARIANTS[-1].name
    part.settings = {**asdict(cluster), **asdict(work)}
    part.metrics = {
        f"{name}_{gpus}": Metric(f"{gpus:,} GPUs: {title}", unit, better, quantity=title, axes={"gpus": gpus})
        for name, (title, unit, better) in _QUANTITIES.items()
        for gpus in sizes
    }
    for number, features in enumerate(VARIANTS):
        found = part.candidates.setdefault(features.name, Samples())
        for gpus in sizes:
            job.progress(f"{features.name}, {gpus} GPUs", number / len(VARIANTS))
            answers = answer(replace(cluster, gpus=gpus), work, features, range(job.rounds))
            found.metrics |= {f"{name}_{gpus}": values for name, values in answers.items()}


def answer(cluster: Cluster, work: Job, features: Features, seeds: range) -> dict[str, list[float]]:
    """Return every quantity of one cluster, with one goodput for each seed."""
    known = costs(cluster, work, features)
    wall = max(30 * _DAY, 20 * known.mtbf)
    best, goodput = best_interval(cluster, known, wall=wall, seeds=seeds)
    cost = known.stall + known.slow_down
    return {
        "amplification": [known.amplification],
        "data_stall": [100 * known.data_stall],
        "stall": [known.stall],
        "durable": [known.durable],
        "restore": [known.restore],
        "young": [young(cost, known.mtbf)],
        "daly": [daly(cost, known.mtbf)],
        "best": [best],
        "goodput": [100 * share for share in goodput],
    }


def _settings(given: Sequence[str]) -> tuple[Cluster, Job]:
    values: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in _names():
            raise UsageError(f"no setting {name!r}", hint=f"there are {', '.join(_names())}")
        try:
            values[name] = float(value)
        except ValueError:
            raise UsageError(f"{text!r}: {value!r} is no number") from None
    return _built(Cluster(8), values), _built(Job(), values)


def _built(default: Any, values: dict[str, float]) -> Any:
    kinds = {field.name: type(getattr(default, field.name)) for field in fields(default)}
    return replace(default, **{name: kinds[name](value) for name, value in values.items() if name in kinds})
