"""The page of `headrace bench report`: one self-contained HTML file about one or several runs.

Invariant: the page has no script, no network access and no dependency. All text from a results file is escaped. The
page is readable in light and dark mode and from 400 pixels up. It first lists the parts that failed, were interrupted
or were left out.
Failure behaviour: none. A metric without samples is a dash.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from importlib import resources

from headrace.bench.core.results import Part, Run
from headrace.bench.core.table import cell, ratio
from headrace.bench.report.charts import charts_of, colours_of, full_title, in_words, limits, says_unit


def page(runs: Sequence[tuple[str, Run]], title: str = "Headrace benchmarks") -> str:
    """Return the HTML of `runs`, which are (name, run) pairs."""
    body = "\n".join(_run(place, name, run) for place, (name, run) in enumerate(runs))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_style()}</style></head><body> <h1>{escape(title)}</h1> <p class="quiet">Medians;
whiskers and brackets span the smallest and largest sample; dots are the samples. All figures of a section come from one
run on one machine in which the candidates took turns.</p> {_troubles(runs)} {_contents(runs)} {body} </body></html>
"""


def _style() -> str:
    return (resources.files("headrace.bench.report") / "page.css").read_text()


def _troubles(runs: Sequence[tuple[str, Run]]) -> str:
    """List the parts that are incomplete, with the reasons."""
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
    details = (
        f"<details class='machine'><summary>{escape(name)}: the machine and the command</summary>{machine}</details>"
    )
    return f'<p class="quiet">{escape(_machine(run))}</p>{details}\n{parts}'


def _machine(run: Run) -> str:
    """Describe the machine and the run in one line, with a warning if the machine was busy."""
    facts = run.environment
    cores, load = facts.get("cpus"), facts.get("load_before")
    known = [
        run.started[:10],
        f"{cores} cores of {facts.get('cpu')}" if cores else "",
        str(facts.get("gpu") or "no GPU"),
    ]
    known += [f"{facts['memory_gib']:g} GiB" if "memory_gib" in facts else "", str(facts.get("file_system", ""))]
    known += [
        f"load {load:g} before" if isinstance(load, float) else "",
        f"commit {facts['commit']}" if "commit" in facts else "",
    ]
    if isinstance(load, float) and isinstance(cores, int) and load > cores / 2:
        known.append("the machine was busy: rates by the clock may be too low")
    return " · ".join(word for word in known if word)


def _part(anchor: str, part: Part) -> str:
    charts = "".join(
        f'<h3>{escape(heading)}</h3><div class="charts">{"".join(drawn)}</div>' for heading, drawn in charts_of(part)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in part.notes)
    state = _state(part)
    trouble = f'<p class="bad">{state}</p>' if state else ""
    settings = " · ".join(f"{key.replace('_', ' ')}: {in_words(value, key)}" for key, value in part.settings.items())
    about = (
        f'<p class="quiet">{escape(settings)}{" · " if settings else ""}{_rounds(part)}took {part.seconds:.0f} s</p>'
    )
    legend = (_legend(part) if len(part.candidates) > 1 else "") + _lines(part)
    return (
        f'<section id="{anchor}"><h2>{escape(part.title or part.name)}</h2>{trouble}{about}{legend}{charts}'
        f"{_limits(part)}{notes}{_table(part)}</section>"
    )


def _rounds(part: Part) -> str:
    """State the largest number of samples that a figure has."""
    counts = [len(values) for found in part.candidates.values() for values in found.metrics.values()]
    return (
        f"{max(counts)} samples of a figure · "
        if counts and max(counts) > 1
        else "one sample of each figure · "
        if counts
        else ""
    )


def _lines(part: Part) -> str:
    """Return the legend of the dashed lines in the charts of a part."""
    beside = [metric for metric in part.metrics.values() if not metric.quantity and len(part.candidates) > 1]
    swept = [metric for metric in part.metrics.values() if metric.quantity]
    kinds = ("limit", "what the machine allows", [*beside, *swept]), ("goal", "goal", beside)
    keys = [
        f'<span><svg class="line" viewBox="0 0 24 8"><line class="{kind}" x1="0" x2="24" y1="4" y2="4"/></svg>{words}</span>'
        for kind, words, drawn in kinds
        if any(getattr(metric, kind) is not None for metric in drawn)
    ]
    return f'<p class="legend">{"".join(keys)}</p>' if keys else ""


def _legend(part: Part) -> str:
    colours = colours_of(part)
    keys = [f'<span><i class="key c{colours[name]}"></i>{escape(name)}</span>' for name in part.candidates]
    return f'<p class="legend">{"".join(keys)}</p>'


def _limits(part: Part) -> str:
    found = limits(part)
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(metric)}</td><td>{escape(median)}</td>"
        f'<td><span class="share" style="--share:{min(share, 1):.3f}">{share:.0%}</span></td>'
        f'<td class="why">{escape(why)}</td></tr>'
        for name, metric, median, share, why in found
    )
    head = "<tr><th></th><th></th><th>median</th><th>of the limit</th><th>the limit</th></tr>"
    return f'<h3>Compared with the physical limit</h3><div class="wide"><table>{head}{rows}</table></div>'


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
        what = full_title(metric)
        kind = f" {metric.quantity}" if metric.quantity else ""
        unit = "" if says_unit(metric) and not kind else f" <small>{escape(metric.unit)}</small>"
        bound = _bound(samples[0], metric.goal, metric.better) if not pair else ""
        rows.append(f"<tr><td>{escape(what + kind)}{unit}</td>{cells}{last}{bound}</tr>")
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
