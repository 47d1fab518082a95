"""What came of packing: for the program, the summary on the terminal and the exit code.

Invariant: a file that was given is packed (and counted in `files`), belongs to a sample that `skipped` accounts for, or is
`ignored`.
Failure behaviour: none; these are descriptions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file whose sample was not packed; `code` is that of the error that it would have been under `strict`."""

    path: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one machine's packer did: groups of input files prepared, their bytes, and for how many seconds it was at work."""

    name: str
    groups: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PackReport:
    """`samples` and `bytes` are those of the shards written. `notes` are remarks about samples that were packed.

    `resumed` counts the units of the plan that an earlier, interrupted start of the same pack had finished.
    """

    files: int
    samples: int
    shards: int
    bytes: int
    seconds: float
    skipped: tuple[Skipped, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    resumed: int = 0
    workers: tuple[WorkerReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far packing has come: groups of files looked at of all, and their bytes of all; skipped ones count."""

    samples: int
    samples_total: int
    bytes: int
    bytes_total: int
    skipped: int
