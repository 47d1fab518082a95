"""The reference page of the command line, made from the parsers of the commands.

Invariant: every command and sub-command of `headrace` is on the page, with every argument that `--help` shows.
Failure behaviour: a command whose parser cannot be made raises the error of its module.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from headrace.bench.cli import COMMANDS as BENCHMARKS
from headrace.dataio.cli import GROUPS
from headrace.dataio.core.cli import Command, Parser

EXIT_CODES = (
    (0, "done"),
    (1, "done in part: some inputs were skipped or found damaged, and are listed"),
    (2, "wrong use, or a missing object"),
    (3, "a temporary failure: try again"),
    (4, "stored data is damaged"),
    (5, "another writer won"),
    (6, "no space, or above a limit"),
    (70, "a bug in Headrace"),
    (130, "interrupted, also by SIGTERM"),
)


def command_page() -> str:
    """The page: one section for each command, in the order of `headrace --help`."""
    parts = ["# Command line", _INTRODUCTION, "| exit code | meaning |\n| --- | --- |"]
    parts[-1] += "".join(f"\n| {code} | {meaning} |" for code, meaning in EXIT_CODES)
    for heading, commands in GROUPS.items():
        parts.append(f"## {heading[0].upper()}{heading[1:]}")
        for name, (target, _) in commands.items():
            for parser in parsers(name, target):
                depth = len(parser.prog.split())
                parts.append(f"{'#' * min(depth + 1, 4)} `{parser.prog}`")
                parts += _sections(parser)
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = (
    "`headrace COMMAND --help` shows the same text. `--json` prints a result for scripts. Commands that delete or replace "
    "something only print their plan, unless `--apply` is given. `headrace --print-completion bash` prints a completion "
    "script."
)


def parsers(name: str, target: str) -> Iterator[argparse.ArgumentParser]:
    """The parser of a command, and those of its sub-commands."""
    if name == "bench":  # its benchmarks are commands of their own, which are imported when they are chosen
        yield Parser(prog="headrace bench", description="Measure Headrace and its peers on this machine.")
        targets = {f"bench {each}": f"headrace.bench.{there}" for each, (there, _) in BENCHMARKS.items()}
    else:
        targets = {name: target}
    for each, there in targets.items():
        module, _, function = there.partition(":")
        command = getattr(importlib.import_module(module), function)
        assert isinstance(command, Command), f"{there} is not a Command"
        parser = Parser(prog=f"headrace {each}")
        command.fill(parser)
        yield from _with_children(parser)


def _with_children(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from _with_children(child)


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The description, the usage, and a table of the arguments of one command."""
    if parser.description:
        yield _escaped(parser.description)
    if not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        yield f"```text\n{_usage(parser)}\n```"
    rows = [_row(parser, action) for action in parser._actions if _is_shown(action)]
    if rows:
        yield "| argument | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows)


def _usage(parser: argparse.ArgumentParser) -> str:
    """The command with its positional arguments; the table has the options."""
    formatter = parser._get_formatter()
    positional = [action for action in parser._actions if not action.option_strings]
    words = [formatter._format_args(each, formatter._get_default_metavar_for_positional(each)) for each in positional]
    return " ".join([parser.prog, "[OPTION ...]", *words])


def _is_shown(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help is not argparse.SUPPRESS


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    metavar = formatter._format_args(action, formatter._get_default_metavar_for_optional(action).upper())
    if action.option_strings:
        name = ", ".join(action.option_strings) + (f" {metavar}" if action.nargs != 0 else "")
    else:
        name = formatter._format_args(action, formatter._get_default_metavar_for_positional(action))
    told = _escaped(formatter._expand_help(action)) if action.help else ""
    return f"| `{name.replace('|', chr(92) + '|')}` | {_default(action)} | {told} |"


def _default(action: argparse.Action) -> str:
    if action.default in (None, False, argparse.SUPPRESS, [], ()) or not action.option_strings:
        return "required" if action.required else ""
    return f"`{action.default}`"


def _escaped(text: str) -> str:
    """Help text as Markdown: on one line, with the characters that Markdown would read as markup escaped."""
    for character in "\\`*_<>|[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
