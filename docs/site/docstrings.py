"""Docstrings as Sphinx reads them: `name` is code, and a loader's page lists all of its arguments.

Failure behaviour: a docstring without the parts that are changed here stays as it is.
"""

from __future__ import annotations

import inspect
import re

_CODE = re.compile(r"(`[^`]+`)")
_ELSEWHERE = re.compile(r"The arguments are those of [^;]*; `help\([^)]*\)` lists them\.\s*", re.DOTALL)


def for_sphinx(lines: list[str], value: object) -> list[str]:
    """The lines of the docstring of `value`, with all arguments of a loader, and as reStructuredText."""
    return [_as_rst(line) for line in _with_arguments(lines, value)]


def _as_rst(line: str) -> str:
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = _CODE.split(line)
    return "".join(f"`{part}`" if _CODE.fullmatch(part) else part.replace("*", "\\*") for part in parts)


def _with_arguments(lines: list[str], value: object) -> list[str]:
    """A loader takes its arguments from classes of options, and its `__init__` has their text."""
    text = "\n".join(lines)
    told = inspect.getdoc(getattr(value, "__init__", None)) or ""
    if not inspect.isclass(value) or not _ELSEWHERE.search(text) or "\nArgs:\n" not in told:
        return lines
    before, _, rest = text.partition("\nArgs:\n")
    note, _, after = rest.partition("\n\n")
    note = " ".join(_ELSEWHERE.sub("", inspect.cleandoc(note)).split())
    arguments = "\n".join(part.partition("\n\n")[0] for part in told.split("\nArgs:\n")[1:])
    parts = [before, f"{note}\n" if note else "", f"Args:\n{arguments}\n", after]
    return "\n".join(part for part in parts if part).split("\n")
