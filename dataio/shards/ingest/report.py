"""The results of packing, for programs, for the summary on the terminal and for the exit code.

Invariant: each input file is either packed (and counted in `files`), part of a sample in `skipped`, or `ignored`.
Failure behaviour: none. These classes only hold data. `skip_error` returns the error that `strict` raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    DeadlineError,
    HeadraceError,
    NotFoundError,
    UnsupportedError,
)
from headrace.dataio.shards.units.engine import WorkerReport


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file whose sample was not packed. `code` is the code of the error that `strict` would have raised."""

    path: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class PackReport:
    """The report of `pack`, `append` or `index`.

    `samples` and `bytes` are totals of the shards. `notes` are remarks about the samples. `resumed` is the number of
    units of the plan that an earlier, interrupted run of the same call had finished. `changed` describes the files that
    changed after they were indexed, and whose samples stay as they are.
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
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of packing: finished groups of files and their bytes, with the totals.

    `samples` and `bytes` include skipped groups.
    """

    samples: int
    samples_total: int
    bytes: int
    bytes_total: int
    skipped: int


def no_text_notes(text_field: str | None, has_text: bool) -> tuple[str, ...]:
    """Return a note if the user named the field with the texts, and no sample has a text. The name may be wrong."""
    if text_field is None or has_text:
        return ()
    return (f"no sample has a text: there is no .txt, and no .json has a text called {text_field!r}",)


def skip_error(item: Skipped) -> HeadraceError:
    """Return the error that a skipped input or shard raises with `strict`."""
    error_types: tuple[type[HeadraceError], ...] = (
        UnsupportedError,
        NotFoundError,
        AccessDeniedError,
        CapacityError,
        DeadlineError,
    )
    error_type = {one.code: one for one in error_types}.get(item.code, CorruptionError)
    return error_type(f"{item.path}: {item.reason}", hint="without strict, it is skipped")
