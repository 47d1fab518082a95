"""Adds up the packs of a repository by run.

Invariant: every pack is counted once, under the run of the attempt that wrote it. Packs of removed steps are counted
under the run of the removed step. Nothing is changed, except as `survey` does.
Cost: COMMITs, decisions, and a listing of all packs. Memory holds a few values for each attempt, not for each pack.
Failure behaviour: `NotFoundError` if there is no repository or no such run. Damaged steps are left out, and their packs
count as packs of no run. `survey` reports such steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from headrace.checkpoint.format import names
from headrace.checkpoint.repository.inventory import many
from headrace.checkpoint.repository.survey import Report, survey
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.store.base import Store


@dataclass(slots=True)
class RunUsage:
    """The stored packs of one run. Sizes are in bytes.

    `state`: the size of the newest step's state. `packs`, `stored`: number and size of the packs of its steps.
    `other_packs`, `other_stored`: those of its uncommitted attempts and removed steps.
    """

    run: str
    steps: int = 0
    state: int = 0
    packs: int = 0
    stored: int = 0
    other_packs: int = 0
    other_stored: int = 0


@dataclass(slots=True)
class Usage:
    """The stored packs of a repository. `unknown_packs`, `unknown_stored`: packs of attempts that belong to no run."""

    runs: list[RunUsage]
    packs: int = 0
    stored: int = 0
    unknown_packs: int = 0
    unknown_stored: int = 0


def usage(store: Store, run: str | None = None, clock: Clock = SYSTEM_CLOCK) -> Usage:
    """Add up the packs of the repository, or of one run."""
    report = survey(store, run, clock)
    total = Usage([])
    by_run = _by_run(report)
    of_steps = {line.attempt: line.run for line in report.steps}
    of_unfinished = {each.attempt: each.run for each in report.unfinished}
    attempts = [
        each for each in store.list_folders(names.PACKS) if run is None or each in of_steps or each in of_unfinished
    ]
    for attempt, packs, stored in many(lambda each: _size(store, each), attempts):
        total.packs += packs
        total.stored += stored
        if attempt in of_steps:
            by_run[of_steps[attempt]].packs += packs
            by_run[of_steps[attempt]].stored += stored
        elif attempt in of_unfinished:
            by_run[of_unfinished[attempt]].other_packs += packs
            by_run[of_unfinished[attempt]].other_stored += stored
        else:
            total.unknown_packs += packs
            total.unknown_stored += stored
    total.runs = [by_run[name] for name in sorted(by_run)]
    return total


def _by_run(report: Report) -> dict[str, RunUsage]:
    newest: dict[str, tuple[int, int]] = defaultdict(lambda: (-1, -1))
    usages: dict[str, RunUsage] = {}
    for line in report.steps:
        run_usage = usages.setdefault(line.run, RunUsage(line.run))
        run_usage.steps += 1
        if line.current and (line.timeline, line.step) > newest[line.run]:
            newest[line.run], run_usage.state = (line.timeline, line.step), line.bytes_state
    for attempt in report.unfinished:
        usages.setdefault(attempt.run, RunUsage(attempt.run))
    return usages


def _size(store: Store, attempt: str) -> tuple[str, int, int]:
    """The attempt, and the number and size of its packs."""
    packs = stored = 0
    for info in store.list(names.packs(attempt)):
        packs, stored = packs + 1, stored + info.size
    return attempt, packs, stored
