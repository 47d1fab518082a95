"""The `headrace` command: finds the sub-command, runs it, and turns errors into one clear message and an exit code.

Invariant: nothing but this file and `headrace.dataio.core` is imported before a sub-command is chosen, so `headrace
--help` answers
at once. Sub-commands are named by strings, so the dispatcher sits below all of them without importing any.
Failure behaviour: a `HeadraceError` becomes `headrace NAME: error: …` on standard error (with `--json`, a JSON object
on standard output) and its exit code, and so does what the machine refuses (full disks, read-only places, memory); anything else
is a bug, said so, with exit code 70 and its traceback on request.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from headrace.dataio.core.errors import MORE_MEMORY, AccessDeniedError, CapacityError, HeadraceError, UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.redact import printable, redact

COMMANDS: dict[str, tuple[str, str]] = {
    "pack": (
        "headrace.dataio.shards.ingest.cli:pack",
        "write media files into tar shards with an index, as a version of a dataset",
    ),
    "index": ("headrace.dataio.shards.in_place.cli:index", "make a dataset over WebDataset tars where they are"),
    "info": ("headrace.dataio.shards.cli:info", "say what a dataset holds"),
    "ls": ("headrace.dataio.shards.cli:ls", "list the samples of a dataset"),
    "cat": ("headrace.dataio.shards.cli:cat", "write one member of one sample to standard output"),
    "order": (
        "headrace.loaders.sampling.cli:order",
        "measure how well a dataset is shuffled, and what that costs in reads",
    ),
    "log": ("headrace.dataio.shards.cli_versions:log", "list the versions of a dataset"),
    "filter": ("headrace.dataio.shards.cli_versions:filter_", "save the samples that meet a condition as a version"),
    "remove": ("headrace.dataio.shards.cli_versions:remove", "make a version without some samples"),
    "merge": ("headrace.dataio.shards.cli_versions:merge", "make a version that also holds other datasets"),
    "tag": ("headrace.dataio.shards.cli_versions:tag", "name a version, or list the names"),
    "diff": ("headrace.dataio.shards.cli_versions:diff", "say what changed between two versions"),
    "export": ("headrace.dataio.shards.look.cli:export", "write the members of samples as files"),
    "preview": ("headrace.dataio.shards.look.cli:preview", "make a page of pictures, durations and sizes"),
    "verify": ("headrace.dataio.shards.verify.cli:verify", "check every byte of a dataset, and repair it from a copy"),
    "quarantine": ("headrace.loaders.cli:quarantine", "list the samples that loaders left out, and why"),
    "sidecar": ("headrace.dataio.sidecar.cli:sidecar", "run the node's daemon, or ask it for its status"),
    "ckpt": ("headrace.checkpoint.cli:ckpt", "list and check the steps of a checkpoint repository"),
    "trace": (
        "headrace.dataio.core.cli_trace:trace",
        "say from event logs where the time went, or draw them for Perfetto",
    ),
    "doctor": ("headrace.dataio.store.cli:doctor", "say whether a store gives what shared checkpoints need"),
    "bench": ("headrace.bench.cli:bench", "measure loaders, checkpoints and stores beside their peers"),
    "demo": ("headrace.bench.demo.cli:demo", "pack, train, kill, resume and prove it, on a local S3 server"),
}
"""Sub-command → (module:function, one line of help). The function takes the remaining arguments and returns an exit code."""

_EXIT_CODES = """\
exit codes: 0 done · 1 done in part (some inputs were skipped or found damaged, and are listed) · 2 wrong use or missing
object · 3 passing trouble, try again · 4 stored data is damaged · 5 another writer won · 6 no space or above a limit ·
70 a bug in Headrace · 130 interrupted, also by SIGTERM"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = f"headrace {args[0]}" if args and args[0] in COMMANDS else "headrace"
    _open_standard()
    try:
        with _terminable():
            code = _run(args)
        print(end="", flush=True)  # here, where somebody can still say that it failed; nothing when it is closed
        return code
    except HeadraceError as error:
        _report(name, error, as_json="--json" in args)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        return _machine(name, error, as_json="--json" in args)
    except MemoryError:
        pass  # what is held by where it was raised is free again after this block
    except Exception as error:
        return _bug(name, error)
    found = CapacityError("this process got no more memory", hint=MORE_MEMORY)
    _report(name, found, as_json="--json" in args)
    return found.exit_code


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"headrace {version('headrace')}")
        return 0
    name = args[0]
    if name not in COMMANDS:
        from difflib import get_close_matches

        meant = "".join(f", did you mean {close!r}?" for close in get_close_matches(name, COMMANDS, 1))
        raise UsageError(f"no command {name!r}{meant}", hint="see headrace --help")
    with naming_extras():
        return _load(COMMANDS[name][0])(args[1:])


def usage() -> str:
    """The text of `headrace --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items())
    head = "usage: headrace COMMAND [OPTION ...]\n\ndata in, checkpoints out"
    return f"{head}\n\n{rows}\n\nheadrace COMMAND --help says more.\n\n{_EXIT_CODES}"


def _load(target: str) -> Callable[[list[str]], int]:
    module, _, function = target.partition(":")
    loaded: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return loaded


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is an interrupt, so that what was made on the way is taken away and what was started ends, also when a scheduler or
    a time limit ends the command. A command that has another use for it sets its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _open_standard() -> None:
    """What the caller closed is nowhere; else the next file that is opened would get its number, and the text.

    What the locale has no letters for is escaped: keys and names of files are in all languages.
    """
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115 - for good, at the lowest free number
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it


def _drop_output() -> None:
    """Leave nothing for the interpreter to write, and to complain of, at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _machine(name: str, error: OSError, *, as_json: bool) -> int:
    """What no room foresaw: a full disk, behind standard output too, or a place where nobody may write, is no bug."""
    from headrace.dataio.core.errors import LIMITS, from_os_error

    behind_output = error.filename is None and error.errno not in LIMITS
    found = from_os_error(error, "output" if behind_output else str(error.filename or "this process"))
    if not isinstance(found, CapacityError | AccessDeniedError):
        return _bug(name, error)
    if behind_output:
        _drop_output()
    _report(name, found, as_json=as_json and not behind_output)
    return found.exit_code


def _bug(name: str, error: Exception) -> int:
    if os.environ.get("HEADRACE_DEBUG"):
        raise error
    what = printable(redact(f"{type(error).__name__}: {error}"))
    print(
        f"{name}: bug in Headrace: {what}\n  next: run again with HEADRACE_DEBUG=1 and report the traceback",
        file=sys.stderr,
    )
    return 70


def _report(name: str, error: HeadraceError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"code": error.code, "message": error.message, "hint": error.hint}}))
        return
    print(printable(f"{name}: error: {error.message}"), file=sys.stderr)
    if error.hint:
        print(printable(f"  next: {error.hint}"), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
