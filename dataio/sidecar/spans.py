"""Spans of what the daemon does for a client, below the client's own.

Invariant: a job's span is recorded once, when it ends. Failure behaviour: where nobody records, nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.dataio.core import tracing
from headrace.dataio.sidecar import messages as m


def job_span(kind: str, about: str, within: str) -> Callable[[m.JobEvent], None]:
    """What is returned wants the events of a job that begins now: `sidecar.job`, from its acceptance to its end."""
    began, clock = time.time(), time.monotonic()

    def heard(event: m.JobEvent) -> None:
        if isinstance(event, m.Done | m.JobFailed) and tracing.recording():
            error = event.code if isinstance(event, m.JobFailed) else ""
            tracing.record(
                "sidecar.job",
                began,
                time.monotonic() - clock,
                within,
                error=error,
                kind=kind,
                about=about,
                token=event.token,
            )

    return heard
