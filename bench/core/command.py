"""The command of every benchmark: shared options, a scratch folder, progress, the results file, the exit code.

To add a benchmark, write a function with the decorator `benchmark`, and list it in `bench/cli.py`:

    @benchmark("pack", "Packing files.", argument("--files", type=positive_int, default=160))
    def pack(job: Job, part: Part) -> None:
        ...

The function adds each result to the part as soon as it is measured. The job has the number of rounds, a scratch folder
and the options.

Invariant: once the options are parsed, the results file is always written. A part that raises is in it as failed, and
an interrupted one as interrupted, with all earlier measurements.

Failure behaviour: the exit code is 1 if something failed, which the output names, and 130 after an interrupt. A
`UsageError` passes through.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace.bench.core.measure import Progress, compile_packages
from headrace.bench.core.report import part_table
from headrace.bench.core.results import Part, Run, encode, environment, prepare, shown, write
from headrace.dataio.core.cli import Argument, Command, argument, command, json_option, positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.redact import redact

EXIT_CODES = (
    "exit codes: 0 all candidates ran; 1 one failed and is named; 130 interrupted; others as in headrace --help"
)


@dataclass(frozen=True)
class Job:
    """The input of a benchmark. `scratch` is an empty folder that is deleted afterwards. `args` are the options."""

    rounds: int
    scratch: Path
    progress: Progress
    args: argparse.Namespace


Fill = Callable[[Job, Part], None]


def benchmark(
    name: str,
    description: str,
    *arguments: Argument,
    rounds: int = 3,
    show: Callable[[Part], str] = part_table,
) -> Callable[[Fill], Command]:
    """Decorator that makes a command from a function that fills a part of a results document.

    Args:
        name: The word after `headrace bench` on the command line.
        description: The text at the start of the command's help.
        arguments: The benchmark's own arguments.
        rounds: The default number of rounds.
        show: Returns the text that is printed without `--json`.
    """
    shared = (
        argument(
            "--rounds", type=positive_int, default=rounds, help="times that everything runs (default: %(default)s)"
        ),
        argument("--directory", type=Path, help="where to write; a temporary folder by default"),
        argument("-o", "--output", type=Path, help="write raw samples and environment to this JSON file"),
        json_option("that JSON"),
    )

    def decorate(fill: Fill) -> Command:
        decorated = command(f"bench {name}", description, *shared, *arguments, epilog=EXIT_CODES)
        return decorated(lambda args: _measure(name, fill, show, args))

    return decorate


def _measure(name: str, fill: Fill, show: Callable[[Part], str], args: argparse.Namespace) -> int:
    if args.output:
        prepare(args.output)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    run = Run(shown(["headrace", "bench", name, *args.argv]), started, environment(args.directory))
    compile_packages()
    with sigterm_interrupts(), _scratch(args.directory) as scratch:
        run.parts.append(_filled(fill, Job(args.rounds, Path(scratch), show_progress(), args), name))
    if args.output:
        write(run, args.output)
    print(encode(run) if args.json else text(run.parts[0], show))
    return exit_code(run)


def _scratch(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="mrb-", dir=directory)
    except OSError as error:
        raise UsageError(
            f"no folder can be made in {directory or tempfile.gettempdir()}: {error.strerror}",
            hint="give --directory a folder that can be written to",
        ) from None


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as an interrupt, so that the results are kept if a time limit or a scheduler ends the program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(run: Run) -> int:
    """Return 0, or 1 if something failed, or 130 after an interrupt."""
    if any(part.status == "interrupted" for part in run.parts):
        return 130
    return 1 if any(part.failed for part in run.parts) else 0


def text(part: Part, show: Callable[[Part], str] = part_table) -> str:
    """Return the text of a part with its heading."""
    notes = "".join(f"\n\n{note}" for note in part.notes)
    return f"\n## {part.title or part.name}\n\n{show(part)}{notes}"


def _filled(fill: Fill, job: Job, name: str) -> Part:
    began, part = time.perf_counter(), Part(name)
    try:
        with naming_extras():
            fill(job, part)
    except UsageError:
        raise
    except KeyboardInterrupt:
        part.status, part.why = "interrupted", "interrupted by the user"
    except Exception as error:
        part.status, part.why = "failed", redact(f"{type(error).__name__}: {error}")[:2000]
    part.seconds = round(time.perf_counter() - began, 3)
    return part


def show_progress() -> Progress:
    """Return a callback that shows progress: one updated line on a terminal, otherwise a line for every new name."""
    last = ""

    def show(name: str, share: float) -> None:
        nonlocal last
        if sys.stderr.isatty():
            print(f"\r\x1b[K{share:4.0%} {name}", end="", file=sys.stderr, flush=True)
        elif name != last:
            print(name, file=sys.stderr, flush=True)
        last = name

    return show
