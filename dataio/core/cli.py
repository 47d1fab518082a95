"""The toolkit for all commands of `headrace`: options, help, output and progress.

A command is a function with the decorator `command`, which lists its arguments. Several commands share the arguments
below, so an option has the same name, type and help everywhere:

    @command("ls", "List the samples of a dataset.", dataset(), version(), json_option("one JSON object a line"))
    def ls(args: argparse.Namespace) -> int:
        ...

Add the command's name to `headrace.dataio.cli`, which adds help, shell completion and error reports.

Invariants: standard output has results only (with `--json`, JSON only). Progress goes to standard error, and only to a
terminal. A command that deletes or replaces something prints its plan, and changes nothing without `--apply`.

Failure behaviour: wrong arguments raise `UsageError`. `headrace.dataio.cli` reports it like every other error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.errors import UsageError

MAX_NUMBER = (1 << 31) - 1
LISTED = 50
"""How many lines of a list a command prints; `--json` prints all."""
SEE_HELP = "exit codes: see headrace --help"

Argument = Callable[[argparse.ArgumentParser], object]
"""Adds one argument, or several, to a parser."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` instead of ending the process, so that `--json` reports wrong arguments too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see {self.prog} --help")


class Command:
    """A command. Calling it with a list of arguments runs it and returns an exit code.

    Args:
        name: The words after `headrace` on the command line.
        description: The text at the start of the command's help.
        arguments: Functions that add the command's arguments to its parser.
        run: Does the work. It gets the parsed arguments and returns the exit code. `args.argv` has all arguments as
            the user gave them.
        epilog: The text at the end of the help, usually the exit codes.
    """

    def __init__(
        self,
        *,
        name: str,
        description: str,
        arguments: Sequence[Argument],
        run: Callable[[argparse.Namespace], int],
        epilog: str = SEE_HELP,
    ) -> None:
        self.name, self.description, self.epilog = name, description, epilog
        self._arguments, self._run = arguments, run
        self.__doc__ = run.__doc__

    def __call__(self, argv: Sequence[str]) -> int:
        parser = Parser(prog=f"headrace {self.name}")
        self.fill(parser)
        return self._run(parser.parse_args(argv, argparse.Namespace(argv=list(argv))))

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's help and arguments to `parser`. Shell completion calls it, too."""
        parser.description, parser.epilog = self.description, self.epilog
        for add in self._arguments:
            add(parser)


def command(
    name: str, description: str, *arguments: Argument, epilog: str = SEE_HELP
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Decorator that makes a `Command` from a function."""

    def decorate(run: Callable[[argparse.Namespace], int]) -> Command:
        return Command(name=name, description=description, arguments=arguments, run=run, epilog=epilog)

    return decorate


# --- arguments


def argument(*names: str, **options: Any) -> Argument:
    """One argument, with the options of `argparse.ArgumentParser.add_argument`."""
    return lambda parser: parser.add_argument(*names, **options)


def group(title: str, *arguments: Argument, description: str | None = None) -> Argument:
    """Arguments under their own heading in the help."""

    def add(parser: argparse.ArgumentParser) -> None:
        section = parser.add_argument_group(title, description)
        for add_argument in arguments:
            add_argument(section)  # type: ignore[arg-type]  # a group has the same add_argument

    return add


def dataset() -> Argument:
    """DATASET: the address of a dataset."""
    return argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix")


def version() -> Argument:
    """--version: which version of the dataset."""
    return argument(
        "--version", metavar="N", type=version_or_tag, help="a version number or tag (default: the newest version)"
    )


def trust_mounts() -> Argument:
    """--trust-mounts: whether a dataset may refer to other stores."""
    return argument(
        "--trust-mounts",
        action="store_true",
        help="let the dataset refer to folders of this machine, private hosts and other S3 endpoints",
    )


def where() -> Argument:
    """--where: a condition that samples must meet."""
    return argument(
        "--where",
        metavar="CONDITION",
        help='only samples that meet this SQL condition: "duration > 2 and height >= 720" (see headrace filter --help)',
    )


def engine() -> Argument:
    """--engine: whether the work runs on this machine or on a Ray cluster."""
    return argument("--engine", choices=("local", "ray"), default="local", help="where the work runs (default: local)")


def journal() -> Argument:
    """--journal: where a command that writes to no dataset records its finished units."""
    return argument(
        "--journal",
        metavar="URL",
        help="a folder or URL for records of finished work, to continue an interrupted run; --engine ray needs it",
    )


def workers(kind: str) -> Argument:
    """--workers: how many processes or threads. `kind` names them in the help."""
    return argument("--workers", metavar="N", type=worker_count, help=f"number of {kind} (default: one per core)")


def json_option(what: str = "one JSON object") -> Argument:
    """--json: print `what` instead of text."""
    return argument("--json", action="store_true", help=f"print {what} instead of text")


def apply_option(what: str) -> Argument:
    """--apply: make the changes. Without it, a command that deletes or replaces something only prints its plan."""
    return argument("--apply", action="store_true", help=f"{what}; without this flag, only print a plan")


# --- types of arguments


def positive_int(text: str, most: int = MAX_NUMBER) -> int:
    """A whole number from 1 to `most`."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:20]) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {most}")
    return int(text)


def positive_float(text: str, most: float = MAX_NUMBER) -> float:
    """A number above 0 and at most `most`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0, at most {most:g}")
    return value


def version_or_tag(text: str) -> int | str:
    """A version's number, or a tag."""
    return positive_int(text) if text.isdecimal() else text


def worker_count(text: str) -> int:
    """A number of worker processes."""
    return positive_int(text, limits.WORKERS)


# --- output


def print_json(value: object) -> None:
    """Print one JSON object over several lines."""
    print(json.dumps(value, indent=1))


def print_json_line(value: object) -> None:
    """Print one JSON object on one line, for commands that print many."""
    print(json.dumps(value))


def one_line(text: object) -> str:
    """Replace line breaks and terminal escapes in `text` with `?`. Names from files may contain both."""
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in str(text))


def print_list(heading: str, lines: Sequence[str], most: int = LISTED) -> None:
    """Print a heading with the number of lines, then the first `most` lines. Prints nothing if there are none."""
    if lines:
        print(f"{heading}: {len(lines)}")
    for line in lines[:most]:
        print(f"  {one_line(line)}")
    if len(lines) > most:
        print(f"  and {len(lines) - most} more (--json lists all)")


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print a summary as rows of a name and a value."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{name:{width}}  {one_line(value)}")


def byte_rate(size: int, seconds: float) -> str:
    """Format a size, a duration and the rate: `3.1 MiB in 2.0 s (1.6 MB/s)`."""
    return f"{limits.format_bytes(size)} in {seconds:.1f} s ({size / 1e6 / max(seconds, 1e-3):.1f} MB/s)"


# --- progress


class _ByteProgress(Protocol):
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_total(self) -> int | None: ...


Done = TypeVar("Done", bound=_ByteProgress)


@contextlib.contextmanager
def byte_progress(
    verb: str, describe: Callable[[Done], str], *, quiet: bool
) -> Iterator[Callable[[Done], None] | None]:
    """Show a progress bar over bytes on the terminal. Yields None if `quiet`, or if there is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(verb + " {task.fields[what]}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", what="…", total=None)

        def show(done: Done) -> None:
            bar.update(task, total=done.bytes_total, completed=done.bytes, what=describe(done))

        yield show


@contextlib.contextmanager
def count_progress(verb: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar over items on the terminal. The callback takes the number done and the total number."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
