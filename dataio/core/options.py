"""What the commands' options have in common: the parser, and types that several have.

Invariant: a value that comes out is in the bounds that its message names.
Failure behaviour: `argparse.ArgumentTypeError`, of which the parser makes a `UsageError` like all others.
"""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from headrace.dataio.core.errors import UsageError

MOST = (1 << 31) - 1


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would print and end the process, which no `--json` would reach."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see {self.prog} --help")


def count(text: str, most: int = MOST) -> int:
    """A whole number from 1 to `most`."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:20]) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {most}")
    return int(text)


def amount(text: str, most: float = MOST) -> float:
    """A number above 0 and at most `most`."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0, at most {most:g}")
    return found
