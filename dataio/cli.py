"""The `headrace` command: finds the sub-command, runs it, and turns errors into one clear message and an exit code.

Invariant: only this file and `headrace.dataio.core` are imported before a sub-command is chosen, so `headrace --help`
answers at once. Commands are named by strings, so this module is below all of them and imports none.
Failure behaviour: a `HeadraceError` becomes `headrace NAME: error: …` on standard error (with `--json`, a JSON object on
standard output) and its exit code. So do a full disk, a read-only folder and too little memory. Any other exception is a
bug: exit code 70, and its traceback with HEADRACE_DEBUG=1.
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
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast

from headrace.dataio.core.cli import Command, Parser
from headrace.dataio.core.errors import MORE_MEMORY, AccessDeniedError, CapacityError, HeadraceError, UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.redact import printable, redact

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "make a dataset": {
        "pack": ("headrace.dataio.shards.cli_pack:pack", "write media files into tar shards with an index"),
        "index": ("headrace.dataio.shards.cli_pack:index", "make a dataset over files that stay where they are"),
    },
    "read a dataset": {
        "info": ("headrace.dataio.shards.cli:info", "show samples, hours, bytes, codecs and sizes of a dataset"),
        "ls": ("headrace.dataio.shards.cli:ls", "list the samples of a dataset"),
        "cat": ("headrace.dataio.shards.cli:cat", "write one member of one sample to standard output"),
        "export": ("headrace.dataio.shards.cli:export", "write the members of samples as files"),
        "preview": ("headrace.dataio.shards.cli:preview", "make an HTML page with pictures, durations and sizes"),
        "order": ("headrace.loaders.sampling.cli:order", "measure how well a loader shuffles a dataset"),
        "samples": ("headrace.loaders.cli_samples:samples", "list the samples of each step of a training run"),
    },
    "change a dataset": {
        "log": ("headrace.dataio.shards.cli_versions:log", "list the versions"),
        "tag": ("headrace.dataio.shards.cli_versions:tag", "name a version, or list the names"),
        "diff": ("headrace.dataio.shards.cli_versions:diff", "show what changed between two versions"),
        "filter": (
            "headrace.dataio.shards.cli_versions:filter_",
            "save the samples that meet a condition as a version",
        ),
        "remove": ("headrace.dataio.shards.cli_versions:remove", "make a version without some samples"),
        "merge": ("headrace.dataio.shards.cli_versions:merge", "make a version that also holds other datasets"),
        "delete": ("headrace.dataio.shards.cli_versions:delete", "delete a dataset with all its versions"),
    },
    "find and repair damage": {
        "verify": (
            "headrace.dataio.shards.verify.cli:verify",
            "check every byte of a dataset, and repair it from a copy",
        ),
        "quarantine": ("headrace.loaders.cli:quarantine", "list the samples that loaders skipped, and why"),
    },
    "keep checkpoints": {
        "ckpt": ("headrace.checkpoint.cli:ckpt", "list, check, copy, export and remove the steps of a repository"),
    },
    "run on a cluster": {
        "doctor": ("headrace.dataio.doctor.cli:doctor", "look at this node and a store, and say what to change"),
        "sidecar": ("headrace.dataio.sidecar.cli:sidecar", "run the node's daemon, or show its status"),
        "trace": ("headrace.dataio.core.cli_trace:trace", "show from event logs where the time went"),
    },
    "try and measure": {
        "demo": ("headrace.bench.demo.cli:demo", "pack, train, kill, resume and compare, on a local S3 server"),
        "bench": ("headrace.bench.cli:bench", "measure loaders, checkpoints and stores, also those of others"),
    },
}
"""Heading → command → (module:function, one line of help). The function takes the arguments and returns an exit code."""
COMMANDS = {name: entry for commands in GROUPS.values() for name, entry in commands.items()}

_SHARED = {
    "object_states": "headrace.checkpoint.object_states:object_states",
    "object_state": "headrace.checkpoint.object_states:object_state",
}
"""Name → module:function of what a command uses of a package that its own package may not import."""

_SHELLS = ("bash", "zsh")
_SPEAK_THEMSELVES = {"bench", "demo", "sidecar"}
"""Commands whose processes write to the terminal on their own."""
WAIT_SECONDS = 2.0
"""After how long a command that has written nothing shows that it is working."""
_EXIT_CODES = """\
--version prints the version. --print-completion bash|zsh prints a completion script for the shell.
Commands that delete or replace something only print their plan, unless --apply is given.

exit codes: 0 done · 1 done in part (some inputs were skipped or found damaged, and are listed) · 2 wrong use or missing
object · 3 temporary failure, try again · 4 stored data is damaged · 5 another writer won · 6 no space or above a limit ·
70 a bug in Headrace · 130 interrupted, also by SIGTERM"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = f"headrace {args[0]}" if args and args[0] in COMMANDS else "headrace"
    _open_standard()
    try:
        with _terminable():
            code = _run(args)
        print(end="", flush=True)  # flush here, where a failure is still reported
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
        return _os_error(name, error, as_json="--json" in args)
    except MemoryError:
        pass  # report below, after the memory held by the traceback is free
    except Exception as error:
        return _bug(name, error)
    memory_error = CapacityError("this process got no more memory", hint=MORE_MEMORY)
    _report(name, memory_error, as_json="--json" in args)
    return memory_error.exit_code


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"headrace {version('headrace')}")
        return 0
    if args[0] == "--print-completion":
        _print_completion(args[1:])
        return 0
    name = args[0]
    if name not in COMMANDS:
        from headrace.dataio.core.suggestions import did_you_mean

        raise UsageError(f"no command {name!r}{did_you_mean(name, COMMANDS)}", hint="see headrace --help")
    waiting = Waiting(f"headrace {name}") if name not in _SPEAK_THEMSELVES else contextlib.nullcontext()
    with naming_extras(), waiting:
        code: int = _load(COMMANDS[name][0])(args[1:])
        return code


def usage() -> str:
    """The text of `headrace --help`."""
    width = max(map(len, COMMANDS))
    text = [
        "usage: headrace COMMAND [OPTION ...]",
        "",
        "the I/O service of a training cluster: data in, checkpoints out",
    ]
    for heading, commands in GROUPS.items():
        text += ["", f"{heading}:", *(f"  {name:{width}}  {line}" for name, (_, line) in commands.items())]
    return "\n".join([*text, "", "headrace COMMAND --help shows the options of a command.", _EXIT_CODES])


def _print_completion(shells: Sequence[str]) -> None:
    """Print the completion script of a shell; this imports every command, but nothing that a command works with."""
    import shtab

    if len(shells) != 1 or shells[0] not in _SHELLS:
        raise UsageError(f"--print-completion takes one of {', '.join(_SHELLS)}", hint="see headrace --help")
    parser = Parser(prog="headrace")
    parser.add_argument("--version", action="store_true", help="print the version")
    actions = parser.add_subparsers()
    for name, (target, line) in COMMANDS.items():
        added = actions.add_parser(name, help=line)
        command = _load(target)
        if isinstance(command, Command):
            command.fill(added)
    print(shtab.complete(parser, shells[0]))


def shared(name: str) -> Callable[..., Any]:
    """Return a function of another package for a command, as the dispatcher finds the commands themselves.

    `headrace samples` is a command of the loaders and reads the position of a loader in a checkpoint. Loaders and
    checkpoints are used without each other, so neither package imports the other.
    """
    return _load(_SHARED[name])


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


class Waiting(contextlib.AbstractContextManager[None]):
    """Shows on the terminal for how long a command has been working, until the command writes something itself.

    The line appears after `seconds` on standard error, if that is a terminal. It is removed as soon as the command uses
    standard output or standard error, for results, a progress bar or the log. A forked child never shows or removes it.
    """

    def __init__(self, name: str, seconds: float = WAIT_SECONDS) -> None:
        self._name, self._seconds, self._pid = name, seconds, os.getpid()
        self._ended, self._shown = threading.Event(), False
        self._streams = sys.stdout, sys.stderr
        self._thread = threading.Thread(target=self._show, name="headrace-waiting", daemon=True)

    def __enter__(self) -> None:
        if self._streams[1].isatty():
            sys.stdout, sys.stderr = (cast(TextIO, _Watched(stream, self.end)) for stream in self._streams)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.end()
        if isinstance(sys.stderr, _Watched):
            sys.stdout, sys.stderr = self._streams

    def end(self) -> None:
        """Remove the line."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._shown:
            self._write("\r\x1b[K")

    def _show(self) -> None:
        began = time.monotonic()
        pause = self._seconds
        while not self._ended.wait(pause):
            self._shown, pause = True, min(1.0, self._seconds)
            self._write(f"\r{self._name}: working, {time.monotonic() - began:.0f} s")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            self._streams[1].write(text)
            self._streams[1].flush()


class _Watched:
    """A standard stream that calls `used` before each use."""

    def __init__(self, stream: TextIO, used: Callable[[], None]) -> None:
        self._stream, self._used = stream, used

    def __getattr__(self, name: str) -> Any:
        self._used()
        return getattr(self._stream, name)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM as an interrupt, so that temporary files are deleted and child processes end when a scheduler or a time
    limit ends the command. A command that handles SIGTERM otherwise sets its own handler."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _open_standard() -> None:
    """Open /dev/null for each standard stream that the caller closed: else the next opened file would get its number.

    Characters that the locale cannot encode are escaped, since keys and file names are in all languages.
    """
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115 - stays open, at the lowest free number
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for standard error


def _drop_output() -> None:
    """Send remaining output to /dev/null, so that the interpreter does not report a failed flush when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_error(name: str, error: OSError, *, as_json: bool) -> int:
    """Report an `OSError` that no module translated: a full disk or a read-only folder is not a bug."""
    from headrace.dataio.core.errors import LIMITS, from_os_error

    behind_output = error.filename is None and error.errno not in LIMITS
    translated = from_os_error(error, "output" if behind_output else str(error.filename or "this process"))
    if not isinstance(translated, CapacityError | AccessDeniedError):
        return _bug(name, error)
    if behind_output:
        _drop_output()
    _report(name, translated, as_json=as_json and not behind_output)
    return translated.exit_code


def _bug(name: str, error: Exception) -> int:
    if os.environ.get("HEADRACE_DEBUG"):
        raise error
    summary = printable(redact(f"{type(error).__name__}: {error}"))
    print(
        f"{name}: bug in Headrace: {summary}\n  next: run again with HEADRACE_DEBUG=1 and report the traceback",
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
