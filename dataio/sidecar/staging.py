"""Checkpoints that clients hand over: staged, followed, shown on the page, recalled from a buddy.

Purpose: between the sessions' state machines and the jobs. Invariants: lives on the loop's thread; jobs belong to the daemon, so
a client's end withdraws only those that were not acknowledged to it. Failure behaviour: a plan that is refused is the answer.
"""

from __future__ import annotations

import asyncio

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.sidecar import machine
from headrace.dataio.sidecar import messages as m
from headrace.dataio.sidecar.saves import Saves
from headrace.dataio.sidecar.served import Client, Tasks
from headrace.dataio.sidecar.spans import job_span
from headrace.dataio.sidecar.tier.room import Tier
from headrace.dataio.sidecar.transfer.job import Job
from headrace.dataio.sidecar.transfer.jobs import Jobs


class Staging:
    """For all clients of one daemon."""

    def __init__(
        self, jobs: Jobs, tier: Tier | None, saves: Saves, loop: asyncio.AbstractEventLoop, tasks: Tasks
    ) -> None:
        self._jobs, self._tier, self._saves, self._loop, self._tasks = jobs, tier, saves, loop, tasks

    def stage(self, client: Client, request: machine.StartJob) -> None:
        """Check and queue a checkpoint."""
        job = self._jobs.submit(
            request.kind,
            request.arena,
            request.plan,
            lambda answer: self._staged(client, request.id, answer),
            about=request.about,
            urgent=request.urgent,
            wait=request.wait,
        )
        if job is not None:
            client.staging.append(job)
            self.show(job)
            self._jobs.follow(job, job_span(request.kind, request.about, request.trace))

    def follow(self, client: Client, request: int, token: str) -> None:
        """Tell the client of a job that was staged earlier."""
        try:
            job = self._jobs.find(token)
        except HeadraceError as error:
            client.carry_out(client.session.refused(request, error))
            return
        self._answer(client, request, job)

    def recall(self, client: Client, request: m.Recall) -> None:
        """Bring the buddy's copy into the tier."""
        self._tasks.spawn(self._recall(client, request))

    def show(self, job: Job) -> None:
        """On the page, from now on."""
        about = (job.token, job.entry.about)
        listener = self._saves.listener(*about, lambda: self._jobs.state(job), lambda: self._jobs.trouble(job))
        self._jobs.follow(job, listener)

    def ended(self, client: Client) -> None:
        """The client is gone."""
        if client.listener is not None:
            self._jobs.leave(client.listener)
        for job in client.staging:
            self._jobs.withdraw(job)

    def _staged(self, client: Client, request: int, answer: Job | HeadraceError) -> None:
        client.staging = [job for job in client.staging if job is not answer]
        if isinstance(answer, HeadraceError):
            client.carry_out(client.session.refused(request, answer))
        else:
            self._answer(client, request, answer)

    def _answer(self, client: Client, request: int, job: Job) -> None:
        client.carry_out(client.session.staged(request, job.token))
        if client.listener is not None and client.ready:
            self._jobs.attend(job, client.listener)

    async def _recall(self, client: Client, request: m.Recall) -> None:
        there = False
        if self._tier is not None:
            there = await self._loop.run_in_executor(self._tier.pool, self._tier.recall, request.source, request.key)
        client.carry_out(client.session.recalled(request.id, there))
