"""The shell around every benchmark: shared options, a scratch folder, progress, the results file, the exit code.

How to add a benchmark: write `fill(job, part)`, which fills the part as it goes, and `main(argv)` that calls `run(argv,
NAME, …, fill)`, and name it in `bench/cli.py`. The job has the rounds, a scratch folder and your own options.
Invariant: once the options are parsed, the results file is always written. A part that raises is in it as failed, an interrupted
one as interrupted, with what it had measured until then. Failure behaviour: exit code 1 when
something failed and is named, 130 when interrupted; an error of the caller (`UsageError`) passes through.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace.bench.core.machine import environment
from headrace.bench.core.measure import Tell, compiled
from headrace.bench.core.results import Part, Run, encode, prepare, shown, write
from headrace.bench.core.table import part_table
from headrace.dataio.core.cli import Parser, positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.redact import redact

EXIT_CODES = (
    "exit codes: 0 all candidates ran; 1 one failed and is named; 130 interrupted; others as in headrace --help"
)


@dataclass(frozen=True)
class Job:
    """What a benchmark gets: `scratch` is an empty folder that is deleted afterwards; `args` are its options."""

    rounds: int
    scratch: Path
    tell: Tell
    args: argparse.Namespace


def parser(name: str, description: str, *, rounds: int = 3) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    made = Parser(
        prog=f"headrace bench {name}",
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--rounds", type=positive_int, default=rounds, help="times that everything runs (default: %(default)s)"
    )
    made.add_argument("--directory", type=Path, help="where to write; a temporary folder by default")
    made.add_argument("-o", "--output", type=Path, help="write raw samples and environment to this JSON file")
    made.add_argument("--json", action="store_true", help="print that JSON instead of tables")
    return made


def run(
    argv: Sequence[str],
    name: str,
    description: str,
    fill: Callable[[Job, Part], None],
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    *,
    rounds: int = 3,
    show: Callable[[Part], str] = part_table,
) -> int:
    """Parse `argv`, run `fill`, write and print what it found; the exit code. `show` makes the text to print."""
    made = parser(name, description, rounds=rounds)
    options(made)
    args = made.parse_args(argv)
    if args.output:
        prepare(args.output)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found = Run(shown(["headrace", "bench", name, *argv]), started, environment(args.directory))
    compiled()
    with terminable(), _scratch(args.directory) as scratch:
        found.parts.append(_guarded(fill, Job(args.rounds, Path(scratch), progress(), args), name))
    if args.output:
        write(found, args.output)
    print(encode(found) if args.json else text(found.parts[0], show))
    return exit_code(found)


def _scratch(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="mrb-", dir=directory)
    except OSError as error:
        raise UsageError(
            f"no folder can be made in {directory or tempfile.gettempdir()}: {error.strerror}",
            hint="give --directory a folder that can be written to",
        ) from None


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM as an interrupt, so that a time-out or a scheduler that ends the program keeps its results."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(found: Run) -> int:
    """0, 1 when something failed, 130 when interrupted."""
    if any(part.status == "interrupted" for part in found.parts):
        return 130
    return 1 if any(part.failed for part in found.parts) else 0


def text(part: Part, show: Callable[[Part], str] = part_table) -> str:
    """A part under its heading."""
    notes = "".join(f"\n\n{note}" for note in part.notes)
    return f"\n## {part.title or part.name}\n\n{show(part)}{notes}"


def _guarded(fill: Callable[[Job, Part], None], job: Job, name: str) -> Part:
    began, found = time.perf_counter(), Part(name)
    try:
        fill(job, found)
    except UsageError:
        raise
    except KeyboardInterrupt:
        found.status, found.why = "interrupted", "interrupted by the user"
    except Exception as error:
        found.status, found.why = "failed", redact(f"{type(error).__name__}: {error}")[:2000]
    found.seconds = round(time.perf_counter() - began, 3)
    return found


def progress() -> Tell:
    """Show progress: one updated line on a terminal, otherwise a line for every new name."""
    last = ""

    def tell(name: str, share: float) -> None:
        nonlocal last
        if sys.stderr.isatty():
            print(f"\r\x1b[K{share:4.0%} {name}", end="", file=sys.stderr, flush=True)
        elif name != last:
            print(name, file=sys.stderr, flush=True)
        last = name

    return tell
