"""`headrace sidecar run` as a program of the nursery: its imports are those of a daemon, not of the whole command."""

from __future__ import annotations

from headrace.dataio import cli
from headrace.dataio.sidecar import cli as _sidecar  # noqa: F401 - imported before the fork, as the next one
from headrace.dataio.sidecar import daemon as _daemon  # noqa: F401


def main(*arguments: str) -> int:
    """Run in the forked process, until a signal ends it."""
    return cli.main(["sidecar", "run", *arguments])
