"""A candidate of a benchmark, a program of the nursery: `main(MODULE:FUNCTION, ARGUMENTS)` prints its figures."""

from __future__ import annotations

import torch.distributed.checkpoint  # before the fork

from headrace.bench.core import measure

assert torch.distributed.checkpoint


def main(function: str, arguments: str) -> None:
    """Run in the forked process."""
    measure.main(function, arguments)
