"""One staged checkpoint, as the daemon keeps it in mind, and what is said of one.

Invariant: `arena` and `plan` are descriptors that the job owns, -1 when it has none (any more).
Failure behaviour: none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headrace.dataio.core.errors import CapacityError, HeadraceError, TransientError
from headrace.dataio.sidecar import messages as m
from headrace.dataio.sidecar.transfer.events import Event
from headrace.dataio.sidecar.transfer.journal import Entry, digest

Listener = Callable[[m.JobEvent], None]
Answer = Callable[["Job | HeadraceError"], None]


@dataclass(slots=True, eq=False)
class Job:
    """One staged checkpoint. `arena` is a descriptor, -1 when there is none (any more)."""

    entry: Entry
    arena: int
    plan: int = -1
    answer: Answer | None = None
    patience: Callable[[], None] = lambda: None
    """Ends its waiting for room."""
    released: bool = False
    lost: bool = False
    """Daemon and worker are gone, and the arena with them; perhaps the trainer still has it."""
    done: int = 0
    total: int = 0
    outcome: m.Done | m.JobFailed | None = None
    failures: int = 0
    """Lines that said so; `entry.failures` of them are dealt with."""
    trouble: m.JobFailed | None = None
    """Why it is tried again."""
    next_try: float = 0.0
    """When, on the monotonic clock."""
    bad_lines: int = 0
    listeners: list[Listener] = field(default_factory=list)
    waiting: list[Listener] = field(default_factory=list)
    """Those of the listeners who wait for its outcome, to act on it."""

    @property
    def token(self) -> str:
        return self.entry.token


def describe(job: Job, state: str) -> dict[str, object]:
    """The job, for people and monitors."""
    problem = job.outcome or job.trouble
    return {
        "token": job.token,
        "kind": job.entry.kind,
        "about": job.entry.about,
        "state": state,
        "urgent": job.entry.urgent,
        "arena_bytes": job.entry.size,
        "done": job.done,
        "total": job.total,
        "released": job.released,
        "workers": job.entry.tries,
        "age_seconds": round(time.time() - job.entry.accepted, 3),
        "ignored_lines": job.bad_lines,
        "error": problem.message[:300] if isinstance(problem, m.JobFailed) else None,
        "failures": job.entry.failures,
        "retry_in_seconds": round(max(job.next_try - time.monotonic(), 0.0), 1) if state == "retrying" else None,
    }


def with_plan(entry: Entry, plan: bytes) -> Entry:
    """The entry, with what the plan is recognised by."""
    return replaced(entry, plan_bytes=len(plan), plan_digest=digest(plan))


def replaced(entry: Entry, **changes: object) -> Entry:
    """The entry with these fields changed."""
    return msgspec.structs.replace(entry, **changes)


def failure(job: Job, event: Event) -> m.JobFailed:
    """What the worker said, within what a message may hold."""
    return m.JobFailed(job.token, event.code[:64], event.message[:4096], event.hint[:4096])


def given_up(failed: m.JobFailed, failures: int, seconds: float) -> m.JobFailed:
    """The end of a job that was tried again and again."""
    text = f" [the sidecar gave up after {failures} tries in {seconds:.0f} s]"
    return m.JobFailed(failed.token, failed.code, failed.message[: 4096 - len(text)] + text, failed.hint)


def no_room(wait: float) -> CapacityError:
    return CapacityError(f"no room for the arena within {wait:g} s", hint="raise arena_bytes, or save less often")


def shutting_down() -> TransientError:
    return TransientError("the sidecar is shutting down", hint="save without it, or try again after its restart")
