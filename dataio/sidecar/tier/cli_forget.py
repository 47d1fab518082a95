"""`headrace sidecar forget`: remove kept steps from the node's tier, also those of which nobody else has a copy.

Invariant: nothing is removed without `--yes`; then exactly what was listed. Failure behaviour: `NotFoundError` where no daemon
answers, it has no tier, or nothing fits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.sidecar.cli_status import ask
from headrace.dataio.store.local_tier.records import Record, TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier


def forget(options: argparse.Namespace) -> int:
    """The command; `options` has socket, run, step, yes and json."""
    tier = ask(options).get("tier")
    if not tier:
        raise NotFoundError("this sidecar has no tier", hint="see tier_dir in docs/sidecar.md")
    shelf = LocalTier(Path(tier["directory"]), TierLimits(tier["budget_bytes"], tier["steps"]))
    chosen = [r for r in shelf.records(run=options.run) if options.step in (None, r.step)]
    if not chosen:
        raise NotFoundError(f"no such step of run {options.run} is kept here", hint="see headrace sidecar status")
    if options.yes:
        shelf.forget(chosen)
    print(json.dumps([_line(r) for r in chosen]) if options.json else _text(chosen, options.yes))
    return 0


def _line(record: Record) -> dict[str, object]:
    return {"run": record.run, "step": record.step, "rank": record.rank, "committed": record.committed > 0}


def _text(records: list[Record], done: bool) -> str:
    lines = [
        f"step {r.step} of run {r.run}, rank {r.rank}: " + ("committed" if r.committed else "NOT KNOWN TO BE COMMITTED")
        for r in records
    ]
    return "\n".join([*lines, "removed" if done else "nothing was removed: say --yes"])
