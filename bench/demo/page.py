"""The demo's page: the loss curves of both runs, superimposed, as one self-contained HTML file.

Invariants: the page has no script, no network access and no dependency. All text from files or stores is escaped. The
page is readable in light and dark mode and from a width of 400 pixels on. The curves show only the reported losses.

Failure behaviour: none. A missing figure is a dash.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from headrace.bench.demo.runs import DemoResult, Event

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 900, 360, 76, 44, 16, 24


def page(result: DemoResult, rows: Sequence[tuple[str, str]]) -> str:
    """Return the HTML of one demo. `rows` are the figures as (name, text)."""
    proof = result.proof
    verdict = (
        "The interrupted run equals the uninterrupted one bit for bit."
        if proof.equal
        else "The runs differ: " + "; ".join(proof.differences)
    )
    table = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Headrace demo</title><style>{_style()}</style></head><body>
<h1>Killed, restarted, and nothing changed</h1>
<p class="verdict{"" if proof.equal else " bad"}" id="verdict">{escape(verdict)}</p>
{_chart(result)}
<p>loss by step: <span class="key" style="background:var(--whole)"></span>uninterrupted
<span class="key" style="background:var(--before)"></span>until the SIGKILL
<span class="key" style="background:var(--after)"></span>after the restart</p>
<table>{table}</table>
</body></html>
"""


def _style() -> str:
    return (resources.files("headrace.bench.demo") / "page.css").read_text()


def _chart(result: DemoResult) -> str:
    reference, killed, resumed = (loss_curve(part) for part in (result.reference, result.killed, result.resumed))
    losses = [loss for _, loss in (*reference, *killed, *resumed)] or [0.0]
    low, high = min(losses), max(losses)
    scale = _Scale(result.settings.steps, low, high if high > low else low + 1.0)
    curves = "".join(
        f'<polyline class="{name}" points="{scale.points(curve)}"/>'
        for name, curve in (("whole", reference), ("killed", killed), ("resumed", resumed))
    )
    marks = ""
    if killed and resumed:
        marks = scale.mark(killed[-1][0], "SIGKILL", 14) + scale.mark(resumed[0][0] - 1, "resumed from here", 30)
    label = f"Loss of {result.settings.steps} steps: the curves of both runs lie over each other"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{scale.axes()}{marks}{curves}</svg>'


class _Scale:
    """Maps steps and losses to coordinates in the drawing."""

    def __init__(self, steps: int, low: float, high: float) -> None:
        self.steps, self.low, self.high = max(steps, 2), low, high

    def x(self, step: float) -> float:
        return _LEFT + (step - 1) / (self.steps - 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, loss: float) -> float:
        return _TOP + (self.high - loss) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)

    def points(self, curve: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(loss):.1f}" for step, loss in curve)

    def mark(self, step: int, name: str, height: int) -> str:
        x = self.x(max(step, 1))
        line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        return f'{line}<text x="{x + 5:.1f}" y="{_TOP + height}">{name} ({step})</text>'

    def axes(self) -> str:
        lines = []
        for tick in range(5):
            loss = self.low + (self.high - self.low) * tick / 4
            y = self.y(loss)
            lines.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text x="2" y="{y + 5:.1f}">{loss:.2f}</text>')
        for tick in range(5):
            step = round(1 + (self.steps - 1) * tick / 4)
            lines.append(f'<text x="{self.x(step) - 8:.1f}" y="{_HEIGHT - 16}">{step}</text>')
        return "".join(lines)


@dataclass(frozen=True)
class Figures:
    """The figures, in seconds, bytes and samples per second.

    `data_wait_share` is the share of the step time that the trainer spent waiting for batches.
    """

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


def figures(result: DemoResult) -> Figures:
    """Compute the figures from the events that the trainers reported."""
    steps = _named(result.reference, "step")
    committed = _named(result.reference, "committed")
    ready = next(iter(_named(result.resumed, "ready")), None)
    end = next(iter(_named(result.reference, "end")), None)
    losses = loss_curve(steps)
    window = max(1, len(losses) // 8)
    return Figures(
        samples_per_second=_rate(steps),
        data_wait_share=_share_waited(steps),
        first_batch_seconds=steps[0]["wait"] if steps else None,
        save_stall_seconds=_median(event["stall"] for event in _named(result.reference, "saved")),
        bytes_state=sum(event["bytes_state"] for event in committed),
        bytes_written=sum(event["bytes_written"] for event in committed),
        saves=len(committed),
        resumed_from=ready["resumed_from"] if ready else None,
        restore_seconds=ready["restore_seconds"] if ready else None,
        resume_seconds=result.resume_seconds,
        first_loss=_median(loss for _, loss in losses[:window]),
        last_loss=_median(loss for _, loss in losses[-window:]),
        quarantined=tuple(f"{entry['key']}: {entry['reason']}" for entry in (end["quarantined"] if end else ())),
    )


def loss_curve(events: Iterable[Event]) -> list[tuple[int, float]]:
    """Return the (step, loss) of every step event."""
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
    numbers = list(values)
    return statistics.median(numbers) if numbers else None
