"""Does the interrupted run equal the uninterrupted one? A pure comparison of what the two reported.

Invariant: `compare` says `equal` only if every step 1 … N is there in both runs with the same sample ids in the same order
and the same loss to the bit, also for the steps that the killed trainer did and its successor did again, and the final
weights have the same digest. What differs is listed, step by step.
Failure behaviour: none; a missing step or digest is a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Proof:
    """`differences` in plain words, at most 20 of them; `repeated` are the steps done by both trainers of the killed run."""

    steps: int
    samples: int
    repeated: tuple[int, ...]
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


def compare(reference: Iterable[Event], killed: Iterable[Event], resumed: Iterable[Event], steps: int) -> Proof:
    """Hold the events of the two trainers of an interrupted run against those of an uninterrupted one."""
    reference, killed, resumed = list(reference), list(killed), list(resumed)
    whole, before, after = _by_step(reference), _by_step(killed), _by_step(resumed)
    differences = _missing("uninterrupted run", whole, steps) + _missing("interrupted run", {**before, **after}, steps)
    for name, part in (("killed trainer", before), ("restarted trainer", after)):
        differences += [line for step in sorted(part) for line in _difference(name, step, whole.get(step), part[step])]
    if not before or not after:
        differences.append("the trainer was not interrupted in mid-run")
    if _weights(reference) is None or _weights(reference) != _weights(resumed):
        differences.append("the final weights differ")
    samples = sum(len(event["ids"]) for event in whole.values())
    return Proof(steps, samples, tuple(sorted(before.keys() & after.keys())), tuple(differences[:20]))


def _by_step(events: Sequence[Event]) -> dict[int, Event]:
    return {event["step"]: event for event in events if event["event"] == "step"}


def _missing(name: str, steps_done: Mapping[int, Event], steps: int) -> list[str]:
    return [f"{name}: step {step} is missing" for step in range(1, steps + 1) if step not in steps_done]


def _difference(name: str, step: int, wanted: Event | None, got: Event) -> list[str]:
    if wanted is None:
        return [f"{name}: step {step} is not in the uninterrupted run"]
    lines = []
    if wanted["ids"] != got["ids"]:
        lines.append(f"{name}: step {step} trained on samples {got['ids']}, not {wanted['ids']}")
    if wanted["loss"] != got["loss"]:
        lines.append(f"{name}: the loss of step {step} is {got['loss']}, not {wanted['loss']}")
    return lines


def _weights(events: Sequence[Event]) -> str | None:
    return next((event["weights"] for event in events if event["event"] == "end"), None)
