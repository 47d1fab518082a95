"""The report: one self-contained HTML file about one or several runs.

Invariant: no script, no network, no dependency; whatever came from a results file is escaped; readable in light and dark
and from 400 pixels up. A part that failed, was interrupted or was left out is shown as such, before everything else.
Failure behaviour: none; what has no samples shows as a dash.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from importlib import resources

from bench.core.results import Part, Run
from bench.core.table import cell, ratio
from bench.report import views


def page(runs: Sequence[tuple[str, Run]], title: str = "Millrace benchmarks") -> str:
    """The HTML of `runs`, each with the name it is called by."""
    body = "\n".join(_run(place, name, run) for place, (name, run) in enumerate(runs))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_style()}</style></head><body> <h1>{escape(title)}</h1> <p class="quiet">Medians;
whiskers and brackets span the smallest and largest sample; dots are the samples. All figures of a section come from one
run on one machine in which the candidates took turns.</p> {_troubles(runs)} {_contents(runs)} {body} </body></html>
"""


def _style() -> str:
    return (resources.files("bench.report") / "page.css").read_text()


def _troubles(runs: Sequence[tuple[str, Run]]) -> str:
    """What is missing, and why, at the top."""
    lines = [
        f"<li><b>{escape(part.name)}</b> {_state(part)}</li>" for _, run in runs for part in run.parts if _state(part)
    ]
    return f'<ul class="bad" id="troubles">{"".join(lines)}</ul>' if lines else ""


def _state(part: Part) -> str:
    if part.status != "done":
        return f"{part.status}: {escape(part.why)}"
    failed = [f"{name}: {found.errors[0]}" for name, found in part.candidates.items() if found.errors]
    return f"in part: {escape('; '.join(failed))}" if failed else ""


def _contents(runs: Sequence[tuple[str, Run]]) -> str:
    links = [
        f'<a href="#{_anchor(place, part)}">{escape(part.title or part.name)}</a>'
        for place, (_, run) in enumerate(runs)
        for part in run.parts
    ]
    return f"<nav>{''.join(links)}</nav>" if len(links) > 1 else ""


def _anchor(place: int, part: Part) -> str:
    return escape(f"r{place}-{part.name}")


def _run(place: int, name: str, run: Run) -> str:
    facts = {"started": run.started, "command": " ".join(run.command)} | {
        key: value for key, value in run.environment.items() if key != "packages"
    }
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in facts.items())
    packages = ", ".join(f"{key} {value}" for key, value in run.environment.get("packages", {}).items())
    machine = f"<table>{rows}<tr><td>packages</td><td>{escape(packages)}</td></tr></table>"
    parts = "\n".join(_part(_anchor(place, part), part) for part in run.parts)
    return f"<details class='machine'><summary>{escape(name)}: the machine and the command</summary>{machine}</details>\n{parts}"


def _part(anchor: str, part: Part) -> str:
    charts = "".join(
        f'<h3>{escape(heading)}</h3><div class="charts">{"".join(drawn)}</div>' for heading, drawn in views.charts(part)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in part.notes)
    state = _state(part)
    trouble = f'<p class="bad">{state}</p>' if state else ""
    settings = ", ".join(f"{key} {value}" for key, value in part.settings.items())
    about = f'<p class="quiet">{escape(settings)}{"; " if settings else ""}{part.seconds:.0f} s</p>'
    legend = _legend(part) if len(part.candidates) > 1 else ""
    return (
        f'<section id="{anchor}"><h2>{escape(part.title or part.name)}</h2>{trouble}{about}{legend}{charts}'
        f"{_limits(part)}{notes}{_table(part)}</section>"
    )


def _legend(part: Part) -> str:
    colours = views.colours_of(part)
    keys = [f'<span><i class="key c{colours[name]}"></i>{escape(name)}</span>' for name in part.candidates]
    return f'<p class="legend">{"".join(keys)}</p>'


def _limits(part: Part) -> str:
    found = views.limits(part)
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(metric)}</td><td>{escape(median)}</td>"
        f'<td><span class="share" style="--share:{min(share, 1):.3f}">{share:.0%}</span></td><td>{escape(why)}</td></tr>'
        for name, metric, median, share, why in found
    )
    head = "<tr><th></th><th></th><th>median</th><th>of the limit</th><th>the limit</th></tr>"
    return f'<h3>Beside the physical limit</h3><div class="wide"><table>{head}{rows}</table></div>'


def _table(part: Part) -> str:
    if not part.candidates:
        return ""
    names = list(part.candidates)
    pair = len(names) > 1 and part.against in part.candidates
    head = "".join(f"<th>{escape(name)}</th>" for name in names) + (
        f"<th>÷ {escape(part.against)}</th>" if pair else ""
    )
    rows = []
    for key, metric in part.metrics.items():
        samples = [part.candidates[name].metrics.get(key) for name in names]
        if not any(samples):
            continue
        cells = "".join(f"<td>{escape(cell(values))}</td>" for values in samples)
        last = f"<td>{ratio(samples[0], part.candidates[part.against].metrics.get(key))}</td>" if pair else ""
        what = f"{metric.axes['operation']} {metric.title}" if "operation" in metric.axes else metric.title
        kind = f" {metric.quantity}" if metric.quantity else ""
        bound = _bound(samples[0], metric.goal, metric.better) if not pair else ""
        rows.append(f"<tr><td>{escape(what + kind)} <small>{escape(metric.unit)}</small></td>{cells}{last}{bound}</tr>")
    opened = " open" if len(rows) <= 24 else ""
    table = f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'
    return f"<details{opened}><summary>All figures: median (smallest–largest)</summary>{table}</details>"


def _bound(values: list[float] | None, goal: float | None, better: str) -> str:
    if goal is None or not values:
        return ""
    middle = statistics.median(values)
    met = middle >= goal if better == "higher" else middle <= goal
    sign = "≥" if better == "higher" else "≤"
    return f'<td class="{"good" if met else "bad"}">{sign} {goal:g} {"met" if met else "not met"}</td>'
