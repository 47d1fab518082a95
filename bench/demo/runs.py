"""The demo itself: an S3 server, a packed dataset, a sidecar, three trainers (one is killed), and the proof.

The proof compares the uninterrupted run with the killed and resumed one: losses, sample ids and final weights, bit for
bit.

Invariant: every process ends before `run_demo` returns, and when the demo is killed.

Failure behaviour: `DemoError` names the part that failed and quotes the end of its log. A trainer that takes too long
is killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bench.core.data import find_clips
from headrace.bench.core.measure import Progress
from headrace.bench.core.processes import DaemonProcess, daemon, environment_variables, log_end
from headrace.bench.demo import Settings
from headrace.dataio import pack
from headrace.dataio.core import programs
from headrace.dataio.core.errors import DeadlineError, HeadraceError
from headrace.dataio.shards.ingest.report import Progress as PackProgress
from headrace.dataio.testing.s3_server import ending_with_parent, find_seaweedfs, start_seaweedfs

_RUN_SECONDS = 300.0


class DemoError(HeadraceError):
    """A part of the demo failed. The message quotes the end of its log."""

    code = "demo"


@dataclass(frozen=True)
class DemoResult:
    """The record of a demo: the events of the three trainers, the measurements (seconds, bytes) and the proof."""

    settings: Settings
    clips: str
    samples: int
    skipped: tuple[str, ...]
    reference: tuple[Event, ...]
    killed: tuple[Event, ...]
    resumed: tuple[Event, ...]
    resume_seconds: float
    sidecar: Mapping[str, Any]
    proof: Proof


def run_demo(settings: Settings, media: Path | None, progress: Progress) -> DemoResult:
    """Run the demo in a scratch folder and return its record."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-")))
        find_seaweedfs()  # raises before anything is reported as started
        progress("S3 server", 0.0)
        server = stack.enter_context(start_seaweedfs())
        server.create_bucket("demo")
        progress("S3 server", 1.0)
        environment = {**programs.environment(), **server.environment()}
        stack.enter_context(environment_variables(server.environment()))  # `pack` runs in this process
        clips, phrase = find_clips(media, scratch)
        progress("pack clips", 0.0)
        dataset = pack([str(path) for path in clips], "s3://demo/dataset", progress=_byte_share("pack clips", progress))
        progress("pack clips", 1.0)
        sidecar = _start_sidecar(stack, scratch)
        environment["HEADRACE_SIDECAR"] = str(sidecar.socket)
        run = partial(_Run, settings=settings, environment=environment, scratch=scratch, progress=progress)
        uninterrupted = run(name="uninterrupted")
        reference = uninterrupted.to_the_end("uninterrupted run")
        interrupted = run(name="interrupted")
        killed = interrupted.killed_after_stage("run to be killed")
        began = time.time()
        resumed = interrupted.to_the_end("restarted run")
        first = next((event["at"] for event in resumed if event["event"] == "step"), began)
        return DemoResult(
            settings=settings,
            clips=phrase,
            samples=len(dataset),
            skipped=tuple(f"{skip.path}: {skip.reason}" for skip in dataset.report.skipped) if dataset.report else (),
            reference=tuple(reference),
            killed=tuple(killed),
            resumed=tuple(resumed),
            resume_seconds=first - began,
            sidecar=_status(sidecar),
            proof=compare(reference, killed, resumed, settings.steps),
        )


def _byte_share(name: str, progress: Progress) -> Callable[[PackProgress], None]:
    return lambda done: progress(name, done.bytes / max(done.bytes_total, 1))


def _start_sidecar(stack: ExitStack, scratch: Path) -> DaemonProcess:
    log, tier = scratch / "sidecar.log", str(scratch / "tier")
    try:
        return stack.enter_context(daemon(scratch, log=log, tier_dir=tier, http_port="off"))
    except RuntimeError as error:
        raise DemoError(str(error)) from None


def _status(sidecar: DaemonProcess) -> Mapping[str, Any]:
    with sidecar.connect() as client:
        status: Mapping[str, Any] = client.status()
        return status


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One named run of the trainer. It may be started several times."""

    settings: Settings
    name: str
    environment: Mapping[str, str]
    scratch: Path
    progress: Progress

    def to_the_end(self, part: str) -> list[Event]:
        """Start the trainer and let it finish."""
        events: list[Event] = []
        with self._started(part) as (process, stream):
            for event in stream:
                events.append(event)
                self._show(part, event)
            if process.wait() != 0:
                raise DemoError(f"the {part} ended with code {process.returncode}: {log_end(self._log(part))}")
        self._raise_failed_saves(part, events)
        self.progress(part, 1.0)
        return events

    def killed_after_stage(self, part: str) -> list[Event]:
        """Start the trainer and kill it one step after the save of `kill_at` was staged."""
        events: list[Event] = []
        staged = False
        with self._started(part) as (process, stream):
            for event in stream:
                events.append(event)
                self._show(part, event)
                staged = staged or (event["event"] == "staged" and event["step"] == self.settings.kill_at)
                if staged and event["event"] == "step":
                    process.send_signal(signal.SIGKILL)
                    break
            events += list(stream)  # events that the trainer wrote before it died
            if process.wait() != -signal.SIGKILL:
                raise DemoError(f"the {part} was not killed during the run: {log_end(self._log(part))}")
        self.progress(part, 1.0)
        return events

    def _show(self, part: str, event: Event) -> None:
        if event["event"] == "step":
            self.progress(part, event["step"] / self.settings.steps)

    def _raise_failed_saves(self, part: str, events: list[Event]) -> None:
        for event in events:
            if event["event"] == "save-failed":
                raise DemoError(f"the {part} could not save step {event['step']}: {event['message']}")

    def _log(self, part: str) -> Path:
        return self.scratch / f"{part.replace(' ', '-')}.log"

    @contextmanager
    def _started(self, part: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[Event]]]:
        chosen = self.settings
        command = [*programs.run_module("headrace.bench.demo.trainer"), "--data", "s3://demo/dataset"]
        command += ["--checkpoints", "s3://demo/checkpoints", "--name", self.name, "--steps", str(chosen.steps)]
        command += ["--save-every", str(chosen.save_every), "--batch-size", str(chosen.batch_size)]
        command += ["--clips-per-video", str(chosen.clips_per_video)]
        self.progress(part, 0.0)
        with self._log(part).open("w") as log:
            process = subprocess.Popen(
                ending_with_parent(command),
                env=dict(self.environment),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        watchdog = threading.Timer(_RUN_SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            yield process, (json.loads(line) for line in process.stdout if line.endswith("\n"))
        finally:
            expired = not watchdog.is_alive()
            watchdog.cancel()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            if expired:
                raise DeadlineError(f"the {part} took longer than {_RUN_SECONDS:.0f} s")


Event = Mapping[str, Any]


@dataclass(frozen=True)
class Proof:
    """The result of the comparison.

    `differences` has at most 20 sentences. `repeated` has the steps that both trainers of the interrupted run executed.
    """

    steps: int
    samples: int
    repeated: tuple[int, ...]
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


def compare(reference: Iterable[Event], killed: Iterable[Event], resumed: Iterable[Event], steps: int) -> Proof:
    """Compare the events of an interrupted run, which has two trainers, with those of the uninterrupted one."""
    reference, killed, resumed = list(reference), list(killed), list(resumed)
    uninterrupted, before, after = _by_step(reference), _by_step(killed), _by_step(resumed)
    differences = _missing("uninterrupted run", uninterrupted, steps) + _missing(
        "interrupted run", {**before, **after}, steps
    )
    for name, part in (("killed trainer", before), ("restarted trainer", after)):
        differences += [
            line for step in sorted(part) for line in _difference(name, step, uninterrupted.get(step), part[step])
        ]
    if not before or not after:
        differences.append("the trainer was not interrupted during the run")
    if _weights(reference) is None or _weights(reference) != _weights(resumed):
        differences.append("the final weights differ")
    samples = sum(len(event["ids"]) for event in uninterrupted.values())
    return Proof(steps, samples, tuple(sorted(before.keys() & after.keys())), tuple(differences[:20]))


def _by_step(events: Sequence[Event]) -> dict[int, Event]:
    return {event["step"]: event for event in events if event["event"] == "step"}


def _missing(name: str, steps_done: Mapping[int, Event], steps: int) -> list[str]:
    return [f"{name}: step {step} is missing" for step in range(1, steps + 1) if step not in steps_done]


def _difference(name: str, step: int, expected: Event | None, actual: Event) -> list[str]:
    if expected is None:
        return [f"{name}: step {step} is not in the uninterrupted run"]
    lines = []
    if expected["ids"] != actual["ids"]:
        lines.append(f"{name}: step {step} trained on samples {actual['ids']}, not {expected['ids']}")
    if expected["loss"] != actual["loss"]:
        lines.append(f"{name}: the loss of step {step} is {actual['loss']}, not {expected['loss']}")
    return lines


def _weights(events: Sequence[Event]) -> str | None:
    return next((event["weights"] for event in events if event["event"] == "end"), None)
