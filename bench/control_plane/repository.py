"""Measures commands and background work on a repository with thousands of steps.

It fills a repository with small, valid steps (`repository_filling`). Then it runs each command of `headrace ckpt`, the
search for the latest step, a restore and retention, each in its own process (`repository_actions`). Without a URL it
starts a SeaweedFS server on loopback, which uses the same cores.

    python -m headrace.bench.control_plane.repository [--steps N] [--ranks N] [--url URL] [--json FILE]

Invariants: the actions that change nothing run before those that remove steps. A check of the whole repository, which
takes longest, comes last. If `--json` is given, the file is written after each action, as `headrace bench -o` does.
Failure behaviour: exit code 1 if an action failed; the table names the action. After an interrupt or SIGTERM, the
figures so far are printed, and the exit code is 130. A repository at a given URL is not deleted. `UsageError` if the
URL has a repository already.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.control_plane.repository_filling import RUN, fill, objects
from headrace.bench.core.command import EXIT_CODES, exit_code, show_progress, sigterm_interrupts, text
from headrace.bench.core.measure import Candidate, Progress, alternate, compile_packages
from headrace.bench.core.processes import environment_variables
from headrace.bench.core.report import short
from headrace.bench.core.results import Metric, Part, Run, Samples, environment, prepare, shown, write
from headrace.dataio.core.cli import argument, command, positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.open import open_store

METRICS = {
    "seconds": Metric("time", "s"),
    "peak_mib": Metric("peak memory", "MiB"),
    "requests": Metric("requests", ""),
    "list": Metric("listings among them", ""),
}
_MODULE = "headrace.bench.control_plane.repository_actions"
_LEAST_STEPS = 4
_TAG = "measured"
_TABLE = os.path.join(tempfile.gettempdir(), "headrace-steps.parquet")
_PAGE = os.path.join(tempfile.gettempdir(), "headrace-report.html")
_AGAIN = "again_"


@dataclass(frozen=True)
class Action:
    """An action: its name in the table, a function of `repository_actions`, and its arguments after the URL."""

    name: str
    function: str
    arguments: tuple[Any, ...]

    def candidate(self, url: str) -> Candidate:
        """The process to measure."""
        return Candidate(self.name, f"{_MODULE}:{self.function}", (url, *self.arguments))


RETENTION, RETENTION_AGAIN = "retention: all but one step stay", "retention after the next commit, same process"


def actions(steps: int, ranks: int) -> list[Action]:
    """The actions on a repository of `steps` steps of `ranks` ranks each, in their order."""
    middle = steps // 2 + 1
    run = ("--run", RUN)
    return [
        Action("latest step", "latest", (steps,)),
        _ckpt("ls", "URL"),
        _ckpt("log", "URL", *run),
        _ckpt("tree", "URL"),
        _ckpt("table", "URL", "-o", _TABLE),
        _ckpt("du", "URL"),
        _ckpt("du", "URL", *run, "--steps"),
        _ckpt("published", "URL"),
        _ckpt("report", "URL", "-o", _PAGE),
        _ckpt("diff", "URL", f"{RUN}@{middle}", f"{RUN}@{middle + 1}"),
        _ckpt("rm", "URL", *run, "--step", str(middle)),
        _ckpt("show", "URL", *run),
        _ckpt("artifacts", "URL", *run),
        _ckpt("show", "URL", *run, "--step", str(middle), "--tensors"),
        _ckpt("tag", "URL", _TAG, *run, "--step", str(middle)),
        _ckpt("tags", "URL"),
        _ckpt("untag", "URL", _TAG),
        Action("headrace.read of one step", "restore", (middle, ranks)),
        _ckpt("retain", "URL", *run, "--last", str(steps - 1)),
        _ckpt("gc", "URL"),
        Action(RETENTION, "retention", (steps, ranks)),
        _ckpt("retain", "URL", *run, "--last", str(steps - 2), "--apply"),
        _ckpt("gc", "URL", "--apply"),
        _ckpt("check", "URL", "--quick"),
        _ckpt("check", "URL"),
    ]


def _ckpt(*words: str) -> Action:
    hidden = {"URL", "--run", RUN, _TAG, "-o", _TABLE, _PAGE}
    return Action(f"ckpt {' '.join(word for word in words if word not in hidden)}", "ckpt", words)


def measure(url: str, part: Part, limit: float, progress: Progress) -> Iterator[None]:
    """Fill the repository at `url` and measure all actions. Yields after each one.

    Args:
        url (str): The URL, without a repository.
        part (Part): The part for the results. Its settings give the numbers of steps and ranks.
        limit (float): The maximum time of one action, in seconds.
        progress (Progress): Called before each action.
    """
    steps, ranks = part.settings["steps"], part.settings["ranks"]
    began = time.perf_counter()
    with open_store(url) as store:
        fill(store, steps, ranks, lambda step: progress(f"filling, {step // 100 * 100} of {steps} steps", 0.0))
    seconds, count = time.perf_counter() - began, objects(steps, ranks)
    part.settings |= {"objects": count, "fill_seconds": round(seconds, 3)}
    part.notes.append(f"{count:,} objects were written in {short(seconds)} s before these actions.")
    yield
    planned = actions(steps, ranks)
    for number, action in enumerate(planned):
        progress(action.name, number / len(planned))
        alternate([action.candidate(url)], 1, lambda *_: None, part.candidates, seconds=limit)
        if action.function == "retention":
            _divide(part.candidates)
        yield


def _divide(candidates: dict[str, Samples]) -> None:
    """Move the figures of the second removal of `repository_actions.retention` to a separate row."""
    metrics = candidates[RETENTION].metrics
    second = {name.removeprefix(_AGAIN): metrics.pop(name) for name in list(metrics) if name.startswith(_AGAIN)}
    candidates[RETENTION_AGAIN] = Samples(second, candidates[RETENTION].errors)


@contextlib.contextmanager
def _repository(url: str | None) -> Iterator[str]:
    """The given URL, or the URL of a bucket of a new SeaweedFS server."""
    if url is not None:
        yield url
        return
    from headrace.dataio.testing.s3_server import start_seaweedfs

    with start_seaweedfs() as server, environment_variables(server.environment()):
        yield server.create_bucket("repository")


@command(
    "bench.control_plane.repository",
    "Measures commands, a restore and retention on a repository with many steps.",
    argument("--steps", type=positive_int, default=2000, help="number of steps (default: %(default)s)"),
    argument("--ranks", type=positive_int, default=64, help="number of ranks of each step (default: %(default)s)"),
    argument("--url", help="an empty directory or s3://bucket/prefix (default: a new SeaweedFS server)"),
    argument("--limit", type=positive_int, default=3600, help="seconds that an action may take (default: %(default)s)"),
    argument("--json", type=Path, metavar="FILE", help="write figures and environment to this JSON file"),
    epilog=EXIT_CODES,
)
def main(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.steps < _LEAST_STEPS:
        raise UsageError(f"--steps {args.steps}: at least {_LEAST_STEPS}")
    if args.json:
        prepare(args.json)
    compile_packages()
    title = f"Repository of {args.steps:,} steps of {args.ranks:,} ranks"
    settings = {"steps": args.steps, "ranks": args.ranks, "store": "SeaweedFS on loopback" if args.url is None else ""}
    part = Part("repository", title, settings=settings, metrics=dict(METRICS))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    words = ["python", "-m", "headrace.bench.control_plane.repository", *args.argv]
    run = Run(shown(words), started, environment(), [part])
    began = time.perf_counter()
    try:
        with sigterm_interrupts(), _repository(args.url) as url:
            for _ in measure(url, part, args.limit, show_progress()):
                part.seconds = round(time.perf_counter() - began, 3)
                if args.json:
                    write(run, args.json)
    except KeyboardInterrupt:
        part.status, part.why = "interrupted", "interrupted by the user"
        if args.json:
            write(run, args.json)
    print(text(part))
    return exit_code(run)


def _main(words: Sequence[str]) -> int:
    try:
        return main(words)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
