"""The page of `headrace ckpt report`: one self-contained HTML file about a repository.

For each run it shows the timelines and forks over time, sizes, durations and stalls of saves, failed attempts, tags, and
the numbers of the metadata as curves. Published names follow.
Invariants: all text from the repository is escaped and shortened. The page has no scripts, needs no network, and is
readable from a width of 400 pixels, in light and dark mode.
Failure behaviour: none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from headrace.checkpoint.format.metadata import Metadata, number_of
from headrace.checkpoint.pages.document import document, style_of
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.report.charts import Series, curve, lanes
from headrace.checkpoint.report.reading import RepositoryReport, RunReport, TimelineRow, Versions
from headrace.checkpoint.repository.survey import StepLine
from headrace.checkpoint.repository.tag_records import Tag
from headrace.dataio.core.limits import counted, format_bytes

MOST_CURVES = 24
"""The maximum number of names of metadata that are drawn for each run."""
MOST_FAILURES, MOST_PROBLEMS = 50, 50
_TEXT = 80
"""Texts of the repository are cut to this number of characters in tables."""
_NONE = "–"
_BRANCH = -1


def page(report: RepositoryReport) -> str:
    """The page."""
    body = _tiles(report) + _problems(report)
    body += "".join(_run(run, [tag for tag in report.tags if tag.run == run.run]) for run in report.runs)
    if report.hidden_runs:
        body += '<p class="quiet">There are more runs. <code>--run</code> selects one.</p>'
    body += _published(report.published)
    style = style_of("headrace.checkpoint.report", "page.css")
    return document(
        "Checkpoint repository", f"{report.url}, {_time(report.created)}", body, style, "headrace ckpt report"
    )


def _tiles(report: RepositoryReport) -> str:
    lines = [line for run in report.runs for line in run.steps]
    failures = sum(len(run.failures) for run in report.runs)
    tiles = [
        (str(len(report.runs)), "runs"),
        (str(len(lines)), "committed steps read"),
        (format_bytes(sum(line.bytes_written for line in lines)), "written by them"),
        (str(failures), "failed attempts"),
        (str(len(report.published)), "published names"),
    ]
    return f'<div class="tiles">{"".join(f"<div><b>{value}</b>{name}</div>" for value, name in tiles)}</div>\n'


def _problems(report: RepositoryReport) -> str:
    if not report.problems:
        return ""
    rows = "".join(
        f"<li>{_cut(each.object, 300)}: {_cut(each.what, 300)}</li>" for each in report.problems[:MOST_PROBLEMS]
    )
    more = len(report.problems) - MOST_PROBLEMS
    rest = f"<li>and {more} more</li>" if more > 0 else ""
    return f'<h2 class="warn">Damaged</h2><ul>{rows}{rest}</ul><p class="quiet">Run <code>headrace ckpt check</code>.</p>\n'


# one run


def _run(run: RunReport, tags: Sequence[Tag]) -> str:
    has_old = any(not line.current for line in run.steps)
    key = '<span><i class="mark"></i>newest branch</span>'
    key += '<span><i class="mark old"></i>other timelines</span>' if has_old or len(run.timelines) > 1 else ""
    key += '<span><i class="mark bad"></i>failed attempts</span>' if run.failures else ""
    drawing = lanes(run, _lane) if run.timelines else ""
    return (
        f"<section><h2>{escape(run.run)}</h2>\n<p>{_summary(run)}</p>\n"
        f'<p class="key">{key}</p><div class="tall">{drawing}</div>\n{_curves(run)}{_tags(tags)}{_failures(run)}{_steps(run)}'
        "</section>\n"
    )


def _summary(run: RunReport) -> str:
    newest = next((line for line in reversed(run.steps) if line.current), None)
    parts = [counted(len(run.steps), "step")]
    if newest is not None:
        parts.append(
            f"newest step {newest.step} ({_time(newest.committed)}), {format_bytes(newest.bytes_state)} of state"
        )
    if run.sizes:
        parts.append(f"{format_bytes(sum(size.unique for size in run.sizes.values()))} unique to single steps")
    else:
        parts.append(f"{format_bytes(sum(line.bytes_written for line in run.steps))} written")
    if run.in_progress:
        parts.append(f"{counted(run.in_progress, 'save')} in progress")
    if run.hidden_steps:
        parts.append(f"{counted(run.hidden_steps, 'older step')} not read")
    if run.hidden_timelines:
        parts.append(f"{counted(run.hidden_timelines, 'older timeline')} not read")
    return " · ".join(parts)


def _lane(row: TimelineRow) -> str:
    origin = "" if row.parent is None else f" from step {row.fork} of timeline {row.parent}"
    steps = counted(row.count, "step") if row.count else "no steps"
    return f"<b>{row.number}</b>{origin} · {steps} <span class=quiet>· {_time(row.created)}</span>"


def _curves(run: RunReport) -> str:
    drawn = [
        curve("duration of the save", _series(run, lambda line: line.seconds or None), _seconds),
        curve("stall of training", _series(run, lambda line: line.stall), _seconds),
        curve("bytes written", _series(run, lambda line: line.bytes_written), _bytes),
    ]
    names = sorted({name for line in run.steps for name in line.metadata if number_of(line.metadata, name) is not None})
    drawn += [curve(name, _series(run, _number(name)), _value) for name in names[:MOST_CURVES]]
    hidden = len(names) - MOST_CURVES
    more = f'<p class="quiet">{hidden} more names of metadata are in --json.</p>' if hidden > 0 else ""
    charts = "".join(drawn)
    return f'<div class="curves">{charts}</div>{more}\n' if charts else ""


def _number(name: str) -> Callable[[StepLine], float | None]:
    def value(line: StepLine) -> float | None:
        found = number_of(line.metadata, name)
        return None if found is None else float(found)

    return value


def _series(run: RunReport, value: Callable[[StepLine], float | None]) -> list[Series]:
    """The newest branch as one series, and what other timelines have in addition."""
    points: dict[int, list[tuple[float, float]]] = {}
    for line in run.steps:
        if (found := value(line)) is not None:
            points.setdefault(_BRANCH if line.current else line.timeline, []).append((float(line.step), found))
    return [Series(sorted(listed), timeline == _BRANCH) for timeline, listed in points.items()]


def _tags(tags: Sequence[Tag]) -> str:
    if not tags:
        return ""
    listed = ", ".join(f"<b>{escape(tag.name)}</b> is step {tag.step}" for tag in tags)
    return f"<p>Tags: {listed}</p>\n"


def _failures(run: RunReport) -> str:
    if not run.failures:
        return ""
    rows = [
        (str(each.step), str(each.timeline), _time(each.began), each.state, _text_cell(each.reason))
        for each in run.failures[:MOST_FAILURES]
    ]
    more = len(run.failures) - MOST_FAILURES
    rest = f'<p class="quiet">and {more} more (--json lists them)</p>' if more > 0 else ""
    title = counted(len(run.failures), "failed attempt")
    return f"<h3>{title}</h3>{_table(('step', 'timeline', 'began', 'outcome', 'reason'), rows)}{rest}\n"


def _steps(run: RunReport) -> str:
    if not run.steps:
        return ""
    heads = ("step", "timeline", "committed", "state", "written", "unique", "shared", "duration", "stall", "metadata")
    rows = [_step(run, line) for line in reversed(run.steps)]
    return f"<details><summary>All {counted(len(rows), 'step')} of this page</summary>{_table(heads, rows)}</details>\n"


def _step(run: RunReport, line: StepLine) -> tuple[str, ...]:
    size = run.sizes.get((line.timeline, line.step))
    return (
        str(line.step) if line.current else f'<span class="quiet">{line.step}</span>',
        str(line.timeline),
        _time(line.committed),
        format_bytes(line.bytes_state),
        format_bytes(line.bytes_written),
        _NONE if size is None else format_bytes(size.unique),
        _NONE if size is None else format_bytes(size.shared),
        _seconds(line.seconds) if line.seconds else _NONE,
        _NONE if line.stall is None else _seconds(line.stall),
        _metadata(line.metadata),
    )


def _metadata(metadata: Metadata) -> str:
    shown = [
        f"{_cut(name)} {_cut(_value(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False))}"
        for name, value in list(metadata.items())[:8]
    ]
    rest = ["…"] if len(metadata) > 8 else []
    return f"<!--text-->{' · '.join([*shown, *rest])}"


# published names


def _published(published: Sequence[Versions]) -> str:
    if not published:
        return ""
    heads = ("name", "version", "published", "run", "step", "weights", "update")
    rows = [_version(record) for each in published for record in each.newest]
    return f"<section><h2>Published names</h2>{_table(heads, rows)}</section>\n"


def _version(record: Published) -> tuple[str, ...]:
    update = _NONE if record.update is None else format_bytes(record.update.size)
    return (
        escape(record.name),
        str(record.number),
        _time(record.created),
        _cut(record.run),
        str(record.step),
        format_bytes(record.bytes),
        update,
    )


# texts


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of HTML cells. A cell that begins with `<!--text-->` may be long."""
    head = "".join(f"<th{' class=text' if each in ('reason', 'metadata') else ''}>{each}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(map(_td, row))}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _td(cell: str) -> str:
    text = cell.removeprefix("<!--text-->")
    return f"<td>{text}</td>" if text == cell else f'<td class="text">{text}</td>'


def _text_cell(text: str) -> str:
    return f"<!--text-->{_cut(text, 300)}"


def _cut(text: str, limit: int = _TEXT) -> str:
    return escape(text if len(text) <= limit else f"{text[:limit]}…")


def _time(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}Z"
    except (ValueError, OverflowError, OSError):  # a time of a hostile document
        return _NONE


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 or value == 0 else f"{1000 * value:.3g} ms"


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def _value(value: float) -> str:
    return f"{value:.4g}"
