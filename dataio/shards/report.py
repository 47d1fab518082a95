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
class PackReport:
    """`bytes` are those of the shards written. `notes` are remarks about samples that were packed."""

    files: int
    samples: int
    shards: int
    bytes: int
    seconds: float
    skipped: tuple[Skipped, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far packing has come: samples looked at of all, and their input bytes of all; skipped ones count."""

    samples: int
    samples_total: int
    bytes: int
    bytes_total: int
    skipped: int
