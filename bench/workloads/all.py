"""`headrace bench all`, which `make bench` runs: a short version of every benchmark, and one report about all of them.

It takes about five minutes on two cores. Each benchmark runs in its own process and gets the time that it needed on two
cores. It may take longer if the later ones still have enough time. When its time is over, it is interrupted and
keeps its results.

Invariant: every requested benchmark is in `OUT/bench.json` and in `OUT/report.md` with its outcome: done, failed,
interrupted or skipped. Both files are rewritten after each benchmark.

Failure behaviour: the exit code is 1 if a benchmark is not done, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace.bench.core.command import exit_code
from headrace.bench.core.report import markdown
from headrace.bench.core.results import Part, Run, environment, read, shown, write
from headrace.dataio.core.cli import argument, command, positive_float
from headrace.dataio.core.errors import HeadraceError, UsageError, translate_os_errors

BY_USER = "interrupted by the user"
GRACE_SECONDS = 20.0
"""The time that an interrupted benchmark has to write its results."""


@dataclass(frozen=True)
class PlannedRun:
    """A benchmark, its options for a short run, and the seconds it needs.

    `name` distinguishes two runs of the same benchmark.
    """

    name: str
    command: tuple[str, ...]
    need: float


_STORE = ("--sizes", "256KiB,8MiB", "--threads", "1,8", "--seconds", "0.15", "--rounds", "2", "--bytes", "32MiB")
_CLIENTS = ("--clients", "headrace;s3fs;obstore", "--operations", "get,range,small,put,list")
PLAN = (
    PlannedRun("store", ("store", *_STORE, *_CLIENTS), 37),
    PlannedRun("directory", ("store", "{scratch}", *_STORE), 16),
    PlannedRun("pack", ("pack", "--files", "24", "--rounds", "2"), 19),
    PlannedRun("loader", ("loader", "--clips", "32", "--rounds", "1"), 34),
    PlannedRun("resume", ("resume", "--clips", "1600", "--rounds", "1"), 22),
    PlannedRun("checkpoint", ("checkpoint", "--size", "64MiB", "--rounds", "1"), 34),
    PlannedRun("sidecar", ("sidecar", "--rounds", "1", "--shards", "2"), 40),
    PlannedRun("simulate", ("simulate", "--rounds", "2"), 8),
)
"""Seconds are measured on two cores of an otherwise idle virtual machine: 210 in total."""


@command(
    "bench all",
    "A short version of every benchmark, and one report of all.",
    argument("--minutes", type=positive_float, default=5.0, help="for all together (default: %(default)s)"),
    argument("--only", help=f"of {', '.join(short.name for short in PLAN)}; separated by commas"),
    argument("-o", "--output", type=Path, default=Path("bench-out"), help="folder (default: %(default)s)"),
    epilog="exit codes: 0 all done; 1 one is not, and is named; 130 interrupted",
)
def all_(args: argparse.Namespace) -> int:
    """Run the plan, or the chosen part of it; `headrace bench all`."""
    plan = _chosen(args.only)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with translate_os_errors(f"making {args.output}"):
        args.output.mkdir(parents=True, exist_ok=True)
    document = Run(shown(["headrace", "bench", "all", *args.argv]), started, environment(args.output))
    document.parts = run(plan, args.output, 60 * args.minutes, document)
    for part in document.parts:
        print(
            f"{part.name:15} {'in part' if part.status == 'done' and part.failed else part.status:12} {part.why[:200]}"
        )
    print(f"wrote {args.output / 'bench.json'} and {args.output / 'report.md'}")
    user = any(part.why == BY_USER for part in document.parts)
    return 130 if user else min(1, exit_code(document))


def _chosen(only: str | None) -> list[PlannedRun]:
    names = only.split(",") if only else [short.name for short in PLAN]
    by_name = {short.name: short for short in PLAN}
    if unknown := [name for name in names if name not in by_name]:
        raise UsageError(f"no benchmark {unknown[0]!r} in the plan", hint=f"there are {', '.join(by_name)}")
    return [by_name[name] for name in names]


def run(plan: Sequence[PlannedRun], folder: Path, seconds: float, document: Run) -> list[Part]:
    """Run the benchmarks one after the other, and write the document after each."""
    until, interrupted = time.monotonic() + seconds, False
    parts = [Part(short.name, status="skipped", why="not started") for short in plan]
    for place, short in enumerate(plan):
        remaining = until - time.monotonic()
        share = time_limit(short.need, remaining, sum(later.need for later in plan[place + 1 :]))
        if interrupted:
            parts[place].why = "interrupted before it was started"
        elif share < 1:
            parts[place].why = "no time was left; --minutes gives more"
        else:
            print(f"{short.name} (at most {share:.0f} s) …", file=sys.stderr, flush=True)
            parts[place], interrupted = _run_one(short, folder, share)
        document.parts = parts
        write(document, folder / "bench.json")
        (folder / "report.md").write_text(markdown([document]))
    return parts


def time_limit(need: float, remaining: float, later: float) -> float:
    """Return the seconds that a benchmark may take.

    It needs `need` seconds, the later ones need `later`, and `remaining` are left. The benchmark gets all time that the
    later ones do not need. If there is too little time for all, it gets its share.
    """
    return max(remaining - later, remaining * need / (need + later) if need + later else 0.0)


def _run_one(short: PlannedRun, folder: Path, seconds: float) -> tuple[Part, bool]:
    """Run one benchmark. Return its part of the results, and whether the user interrupted it."""
    path, log, scratch = folder / f"{short.name}.json", folder / f"{short.name}.log", folder / "scratch"
    path.unlink(missing_ok=True)
    scratch.mkdir(exist_ok=True)
    options = [text.format(scratch=scratch) for text in short.command]
    command = [sys.executable, "-m", "headrace.dataio.cli", "bench", *options, "-o", str(path)]
    began, interrupted, cut = time.monotonic(), False, False
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            cut = True
        except KeyboardInterrupt:
            interrupted = True
        if process.poll() is None:
            _stop(process)
    part = _result(short, path, log, process.returncode)
    part.name, part.seconds = short.name, round(time.monotonic() - began, 1)
    if cut and part.status != "done":
        part.status, part.why = "interrupted", f"stopped after its time limit of {seconds:.0f} s; --minutes gives more"
    elif interrupted:
        part.status, part.why = "interrupted", BY_USER
    return part, interrupted


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process, as Ctrl-C does, and kill it if it does not end."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _result(short: PlannedRun, path: Path, log: Path, code: int) -> Part:
    try:
        return read(path).parts[0]
    except (HeadraceError, IndexError):
        last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        return Part(short.name, status="failed", why=f"exit status {code}: {last[:1500]}")
