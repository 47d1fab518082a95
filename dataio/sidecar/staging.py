"""Clients' requests about checkpoints: staging, following, the status page, fetching from a buddy.

Purpose: connects the sessions' state machines with the jobs.
Invariants: runs on the loop's thread. Jobs belong to the daemon: when a client disconnects, only those of its jobs that
still wait for room are withdrawn. A job's trace span is recorded once, when the job ends.
Failure behaviour: when a plan is refused, the client gets the error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.dataio.core import tracing
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import session
from headrace.dataio.sidecar.jobs.job_service import JobService
from headrace.dataio.sidecar.jobs.job_table import Job
from headrace.dataio.sidecar.save_stats import SaveStats
from headrace.dataio.sidecar.tier.tier_service import TierService

if TYPE_CHECKING:
    from headrace.dataio.sidecar.connections import BackgroundTasks, ClientState


class StagingService:
    """Serves the staged checkpoints of all clients."""

    def __init__(
        self,
        jobs: JobService,
        *,
        tier: TierService | None,
        saves: SaveStats,
        loop: asyncio.AbstractEventLoop,
        tasks: BackgroundTasks,
    ) -> None:
        self._jobs, self._tier, self._saves, self._loop, self._tasks = jobs, tier, saves, loop, tasks

    def stage(self, client: ClientState, request: session.StartJob) -> None:
        """Check and queue a checkpoint."""
        job = self._jobs.submit(
            request.kind,
            request.arena,
            request.plan,
            lambda answer: self._on_submitted(client, request.id, answer),
            about=request.about,
            urgent=request.urgent,
            wait=request.wait,
        )
        if job is not None:
            client.staging.append(job)
            self.show(job)
            self._jobs.follow(job, job_span(request.kind, request.about, request.trace))

    def follow(self, client: ClientState, request: int, token: str) -> None:
        """Send the client the events of a job that was staged earlier."""
        try:
            job = self._jobs.find(token)
        except HeadraceError as error:
            client.execute(client.session.refused(request, error))
            return
        self._answer(client, request, job)

    def recall(self, client: ClientState, request: m.Recall) -> None:
        """Fetch the buddy's copy into the local tier."""
        self._tasks.spawn(self._recall(client, request))

    def show(self, job: Job) -> None:
        """Show the job on the status page."""
        about = (job.token, job.entry.about)
        listener = self._saves.listener(*about, lambda: self._jobs.state(job), lambda: self._jobs.trouble(job))
        self._jobs.follow(job, listener)

    def ended(self, client: ClientState) -> None:
        """The client has disconnected."""
        if client.listener is not None:
            self._jobs.leave(client.listener)
        for job in client.staging:
            self._jobs.withdraw(job)

    def _on_submitted(self, client: ClientState, request: int, answer: Job | HeadraceError) -> None:
        client.staging = [job for job in client.staging if job is not answer]
        if isinstance(answer, HeadraceError):
            client.execute(client.session.refused(request, answer))
        else:
            self._answer(client, request, answer)

    def _answer(self, client: ClientState, request: int, job: Job) -> None:
        client.execute(client.session.staged(request, job.token))
        if client.listener is not None and client.ready:
            self._jobs.attend(job, client.listener)

    async def _recall(self, client: ClientState, request: m.Recall) -> None:
        found = False
        if self._tier is not None:
            found = await self._loop.run_in_executor(self._tier.pool, self._tier.recall, request.source, request.key)
        client.execute(client.session.recalled(request.id, found))


def job_span(kind: str, about: str, within: str) -> Callable[[m.JobEvent], None]:
    """A listener for the events of a job that begins now; it records the span `sidecar.job` at the end."""
    began, clock = time.time(), time.monotonic()

    def on_event(event: m.JobEvent) -> None:
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

    return on_event
