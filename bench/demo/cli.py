"""`headrace demo`: runs the demo with a progress display, then prints a summary.

Invariant: exit code 0 means that the resumed run equals the uninterrupted one and that the loss fell. Any other outcome
has another exit code.

Failure behaviour: `DemoError` names the part that failed. No process is left running.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.demo import Settings
from headrace.dataio.core.cli import argument, command, json_option, positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import format_bytes

if TYPE_CHECKING:
    from headrace.bench.core.measure import Progress
    from headrace.bench.demo.page import Figures
    from headrace.bench.demo.runs import DemoResult

_PROOF_FAILED = 1


@command(
    "demo",
    "Pack clips into a local S3 server, train a small video model, kill the trainer with SIGKILL during the run, restart it,\n"
    "and prove that the run equals an uninterrupted one bit for bit.",
    argument("--out", type=Path, default=Path("demo-out"), help="folder for the page (default: %(default)s)"),
    argument("--media", type=Path, help="folder of clips to train on (default: real ones if found, else generated)"),
    argument("--steps", type=positive_int, default=Settings.steps, help="steps of a run (default: %(default)s)"),
    argument("--save-every", type=positive_int, default=Settings.save_every, help="steps between saves"),
    json_option("one JSON object"),
    epilog="exit codes: 0 the runs are equal and the loss fell; 1 they are not; others as in headrace --help",
)
def demo(args: argparse.Namespace) -> int:
    """Run the demo and return the exit code; see `headrace demo --help`."""
    settings = _settings(args)
    args.out.mkdir(parents=True, exist_ok=True)  # fail early: the demo runs for a minute
    # Imported late: these modules take a second, which --help does not need.
    from headrace.bench.demo.page import figures, page
    from headrace.bench.demo.runs import run_demo

    began = time.monotonic()
    with _progress() as progress:
        result = run_demo(settings, args.media, progress)
    seconds = time.monotonic() - began
    measured = figures(result)
    written = args.out / "index.html"
    written.write_text(page(result, rows(result, measured, seconds)))
    fell = _loss_fell(measured)
    if args.json:
        print(json.dumps(_as_json(result, measured, seconds, written)))
    else:
        _screen(result, measured, seconds, written)
    return 0 if result.proof.equal and fell else _PROOF_FAILED


def _settings(args: argparse.Namespace) -> Settings:
    if args.save_every < 1 or args.steps < 2 * args.save_every + 2:
        raise UsageError(
            f"{args.steps} steps with a save every {args.save_every} leave no step for a kill during the run",
            hint="give --steps at least twice --save-every plus 2",
        )
    kill_at = args.steps // 2 // args.save_every * args.save_every
    return Settings(steps=args.steps, save_every=args.save_every, kill_at=max(kill_at, args.save_every))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show progress: a bar for each part on a terminal, otherwise plain lines.

    Progress goes to standard error, so that standard output holds only the JSON of `--json`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, object] = {}

        def show(part: str, share: float) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=1.0)
            bars.update(tasks[part], completed=share)  # type: ignore[arg-type]  # rich's own opaque id

        yield show


def _plain_lines() -> Progress:
    printed: set[tuple[str, float]] = set()

    def show(part: str, share: float) -> None:
        word = {0.0: "started", 1.0: "done"}.get(share)
        if word and (part, share) not in printed:
            printed.add((part, share))
            print(f"{part}: {word}", file=sys.stderr, flush=True)

    return show


def rows(result: DemoResult, measured: Figures, seconds: float) -> list[tuple[str, str]]:
    """Return the figures as text to display: (name, text) pairs."""
    settings = result.settings
    written, state = format_bytes(measured.bytes_written), format_bytes(measured.bytes_state)
    rate, waited = _number(measured.samples_per_second, ".1f"), _percent(measured.data_wait_share)
    restore, resume = _number(measured.restore_seconds, ".2f"), f"{measured.resume_seconds:.2f}"
    return [
        ("trained on", f"{result.samples} samples packed from {result.clips}; {len(result.skipped)} files skipped"),
        (
            "loss",
            f"{_number(measured.first_loss, '.4f')} → {_number(measured.last_loss, '.4f')} over {settings.steps} steps",
        ),
        ("throughput", f"{rate} samples/s, {waited} of the time spent waiting for data"),
        ("time to first batch", f"{_number(measured.first_batch_seconds, '.2f')} s"),
        ("save stall (median)", f"{_number(measured.save_stall_seconds, '.4f')} s"),
        ("written / state", f"{written} written for {state} of state in {measured.saves} saves"),
        ("killed", f"with SIGKILL, right after the save of step {settings.kill_at} was staged"),
        (
            "resumed",
            f"from step {measured.resumed_from}; restore {restore} s; start of process to first step {resume} s",
        ),
        ("quarantined", ", ".join(measured.quarantined) or "nothing"),
        ("proof", _proof_text(result)),
        ("whole demo", f"{seconds:.0f} s"),
    ]


def _proof_text(result: DemoResult) -> str:
    proof = result.proof
    if not proof.equal:
        return "FAILED: " + "; ".join(proof.differences)
    return (
        f"{proof.steps} losses, {proof.samples} sample ids and the final weights are equal bit for bit; "
        f"of these, {len(proof.repeated)} done by both trainers of the interrupted run"
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _loss_fell(measured: Figures) -> bool:
    return (
        measured.first_loss is not None and measured.last_loss is not None and measured.last_loss < measured.first_loss
    )


def _screen(result: DemoResult, measured: Figures, seconds: float, written: Path) -> None:
    print()
    for name, text in rows(result, measured, seconds):
        print(f"{name:>20}  {text}")
    for skipped in result.skipped:
        print(f"{'skipped':>20}  {skipped}")
    if not _loss_fell(measured):
        print(f"{'FAILED':>20}  the loss did not fall")
    print(f"\n{'the curves':>20}  {written.resolve()}")


def _as_json(result: DemoResult, measured: Figures, seconds: float, written: Path) -> dict[str, object]:
    return {
        "equal": result.proof.equal,
        "differences": list(result.proof.differences),
        "steps": result.proof.steps,
        "samples_compared": result.proof.samples,
        "steps_done_twice": list(result.proof.repeated),
        "killed_after_staging_step": result.settings.kill_at,
        "figures": asdict(measured),
        "samples": result.samples,
        "skipped": list(result.skipped),
        "sidecar": result.sidecar,
        "seconds": seconds,
        "page": str(written),
    }
