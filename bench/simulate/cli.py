"""`headrace bench simulate`: from 8 to 16,384 GPUs, with and without the sidecar, deduplication and the local tier.

Purpose: read amplification, waits for data, stall and duration of a checkpoint, its best interval (Young, Daly, and by
trying), and goodput.
Invariant: every setting is in the results; nothing is measured here, what was measured comes in by `--measured` or
`--set`. Failure behaviour: a setting that does not exist is a `UsageError` that names those that do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from headrace.bench.core import command
from headrace.bench.core.results import Metric, Part, Run, Samples, read
from headrace.bench.core.table import short
from headrace.bench.simulate.cluster import VARIANTS, Cluster, Features, Job, best_interval, costs, daly, young
from headrace.dataio.core.errors import UsageError

GPUS = (8, 64, 512, 4096, 16384)
_DAY = 86400.0
_QUANTITIES = {
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


def main(argv: Sequence[str]) -> int:
    """Run the model and return the exit code."""
    return command.run(argv, "simulate", __doc__ or "", fill, _options, rounds=5, show=show)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)), help="default: %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"one of {', '.join(_names())}"
    )
    parser.add_argument(
        "--measured",
        action="append",
        default=[],
        type=Path,
        help="results of `store` or of the GPU drill whose medians replace settings",
    )


def fill(job: command.Job, part: Part) -> None:
    """Compute every cluster size and variant. Each round is one seed."""
    args = job.args
    cluster, work = _settings(args.set)
    for path in args.measured:
        cluster, work, notes = calibrated(read(path), cluster, work)
        part.notes += [f"{path.name}: {note}" for note in notes]
    sizes = [int(text) for text in args.gpus.split(",")]
    if min(sizes) < 1:
        raise UsageError("a cluster has at least one GPU")
    part.title, part.against = "Scale on paper: a model, not a measurement", VARIANTS[-1].name
    part.settings = {**asdict(cluster), **asdict(work)}
    part.metrics = {
        f"{name}_{gpus}": Metric(f"{gpus:,} GPUs: {title}", unit, _better(better), quantity=title, axes={"gpus": gpus})
        for name, (title, unit, better) in _QUANTITIES.items()
        for gpus in sizes
    }
    for number, features in enumerate(VARIANTS):
        found = part.candidates.setdefault(features.name, Samples())
        for gpus in sizes:
            job.tell(f"{features.name}, {gpus} GPUs", number / len(VARIANTS))
            answers = answer(replace(cluster, gpus=gpus), work, features, range(job.rounds))
            found.metrics |= {f"{name}_{gpus}": values for name, values in answers.items()}


def _better(text: str) -> Any:
    return text


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


def _names() -> list[str]:
    return [field.name for kind in (Cluster, Job) for field in fields(kind) if field.name != "gpus"]


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


def calibrated(run: Run, cluster: Cluster, work: Job) -> tuple[Cluster, Job, list[str]]:
    """Replace settings by measured medians.

    The `store` benchmark gives a node's fastest read. The drill's `staging` part gives the rate of copies to the host.
    """
    notes: list[str] = []
    for part in run.parts:
        if part.name in ("store", "directory"):
            cluster = _store(part, cluster, notes)
        elif part.name == "staging" and "cuda" in str(part.settings.get("device")):
            cluster, work = _staging(part, cluster, work, notes)
    return cluster, work, notes or ["nothing in it that the model can take over"]


def _store(part: Part, cluster: Cluster, notes: list[str]) -> Cluster:
    ours = next(iter(part.candidates.values())).metrics if part.candidates else {}
    rates = [
        statistics.median(ours[name])
        for name, metric in part.metrics.items()
        if metric.quantity == "throughput" and metric.axes.get("operation") == "get" and ours.get(name)
    ]
    if not rates:
        return cluster
    notes.append(f"a node reads {max(rates):.3g} MB/s at most")
    return replace(cluster, nic_rate=max(rates) * 1e6)


def _staging(part: Part, cluster: Cluster, work: Job, notes: list[str]) -> tuple[Cluster, Job]:
    rates = [
        statistics.median(found.metrics["rate"]) for found in part.candidates.values() if found.metrics.get("rate")
    ]
    shares = [value for found in part.candidates.values() for value in found.metrics.get("share", [])]
    if rates:
        cluster = replace(cluster, d2h_rate=max(rates) * 1e9)
        notes.append(f"device to host {max(rates):.3g} GB/s")
    if shares:
        work = replace(work, stage_efficiency=statistics.median(shares) / 100)
        notes.append(f"save copies at {statistics.median(shares):.3g} % of that")
    return cluster, work
