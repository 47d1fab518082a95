"""Runs a program of examples/ as `python examples/PROGRAM ARGUMENTS` does: `example_program PROGRAM ARGUMENTS`.

The nursery has imported torch and the loaders already, so that several programs cost one import.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch  # noqa: F401

import headrace.checkpoint.api
import headrace.checkpoint.publishing.subscriber
import headrace.loaders.field_loader
import headrace.loaders.video_loader  # noqa: F401

FOLDER = Path(__file__).parents[2] / "examples"


def main(program: str, *arguments: str) -> None:
    """Run the program. "::" among the arguments runs it again in the same process, with those after it."""
    sys.path.insert(0, str(FOLDER))
    runs: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "::":
            runs.append([])
        else:
            runs[-1].append(argument)
    for run in runs:
        sys.argv = [str(FOLDER / program), *run]
        runpy.run_path(sys.argv[0], run_name="__main__")
