"""The demo's figures: pure arithmetic over the events of a journey.

Invariant: every figure comes from events that were reported; nothing is assumed when an event is missing (it is None).
Failure behaviour: none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.bench.demo.journey import Journey
from headrace.bench.demo.proof import Event


@dataclass(frozen=True)
class Figures:
    """Seconds, bytes and samples per second; `data_wait_share` is the part of step time spent waiting for batches."""

    samples_per_second: float | None
    data_wait_share: float | None
    first_batch_seconds: float | None
    save_stall_seconds: float | None
    bytes_state: int
    bytes_written: int
    saves: int
    resumed_from: int | None
    restore_seconds: float | None
    resume_seconds: float
    first_loss: float | None
    last_loss: float | None
    quarantined: tuple[str, ...]


def figures(journey: Journey) -> Figures:
    """Work the figures out of what the trainers reported."""
    steps = _named(journey.reference, "step")
    committed = _named(journey.reference, "committed")
    ready = next(iter(_named(journey.resumed, "ready")), None)
    end = next(iter(_named(journey.reference, "end")), None)
    losses = loss_curve(steps)
    window = max(1, len(losses) // 8)
    return Figures(
        samples_per_second=_rate(steps),
        data_wait_share=_share_waited(steps),
        first_batch_seconds=steps[0]["wait"] if steps else None,
        save_stall_seconds=_median(event["stall"] for event in _named(journey.reference, "saved")),
        bytes_state=sum(event["bytes_state"] for event in committed),
        bytes_written=sum(event["bytes_written"] for event in committed),
        saves=len(committed),
        resumed_from=ready["resumed_from"] if ready else None,
        restore_seconds=ready["restore_seconds"] if ready else None,
        resume_seconds=journey.resume_seconds,
        first_loss=_median(loss for _, loss in losses[:window]),
        last_loss=_median(loss for _, loss in losses[-window:]),
        quarantined=tuple(f"{entry['key']}: {entry['reason']}" for entry in (end["quarantined"] if end else ())),
    )


def loss_curve(events: Iterable[Event]) -> list[tuple[int, float]]:
    """(step, loss) of every step event."""
    return [(event["step"], float.fromhex(event["loss"])) for event in events if event["event"] == "step"]


def _named(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _rate(steps: Sequence[Event]) -> float | None:
    if len(steps) < 2:
        return None
    seconds: float = steps[-1]["at"] - steps[0]["at"]
    return sum(len(event["ids"]) for event in steps[1:]) / max(seconds, 1e-9)


def _share_waited(steps: Sequence[Event]) -> float | None:
    waited: float = sum(event["wait"] for event in steps[1:])
    worked: float = sum(event["compute"] for event in steps[1:])
    return waited / (waited + worked) if waited + worked else None


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None
