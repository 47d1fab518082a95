"""The preview as HTML.

Invariants: all text from the dataset is escaped. The page holds its style and pictures itself, and no script. It is
readable from a width of 400 pixels, in light and dark mode.
Failure behaviour: none; the page depends only on its arguments.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from typing import Any

import numpy as np
import pyarrow.compute as pc

from headrace.dataio.core import limits
from headrace.dataio.shards.contract import Sample
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.look import histogram
from headrace.dataio.shards.workers.media_jobs import Pictures

_ROWS = 8
_CAPTION = 600
_NARROWEST = 0.75
_COLUMNS = (
    "duration",
    "bytes",
    "video_codec",
    "audio_codec",
    "width",
    "height",
    "fps_numerator",
    "fps_denominator",
    "text",
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample and its pictures."""

    sample: Sample
    pictures: Pictures


def page(dataset: Dataset, shown: Sequence[Shown], frames: int) -> str:
    """Return the whole page. The strip of a sample has room for `frames` pictures."""
    style = resources.files("headrace.dataio.shards.look").joinpath("preview.css").read_text(encoding="utf-8")
    name = html.escape(dataset.name)
    cards = "".join(_card(one, frames) for one in shown)
    some = f"{len(shown):,} of {len(dataset):,}, evenly spread" if len(shown) < len(dataset) else f"all {len(shown):,}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} · version {dataset.version}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{name}</h1>\n{_about(dataset)}</header>\n{_figures(dataset)}"
        f'<h2>Samples <small>{some}</small></h2>\n<ul class="samples">\n{cards}</ul>\n'
        f"<footer>made by headrace preview · digest {html.escape(dataset.digest[:16])}</footer>\n</body>\n</html>\n"
    )


def _about(dataset: Dataset) -> str:
    document = dataset.document
    said = f" · {html.escape(document.message)}" if document.message else ""
    when = html.escape(document.created.replace("T", " ").replace("+00:00", " UTC"))
    lines = [f'<p class="quiet">version {dataset.version} of {when}{said} · {html.escape(dataset.url)}</p>']
    if dataset.view is not None:
        lines += [f"<p>only where <code>{html.escape(condition)}</code></p>" for condition in dataset.lineage.where]
    return "\n".join(lines) + "\n"


def _figures(dataset: Dataset) -> str:
    table = dataset.columns(_COLUMNS)
    seconds = float(pc.sum(table["duration"], min_count=0).as_py())
    count = max(1, len(dataset))
    figures = [
        ("sample" if len(dataset) == 1 else "samples", f"{len(dataset):,}"),
        ("hours" if seconds >= 3600 else "minutes", f"{seconds / (3600 if seconds >= 3600 else 60):,.1f}"),
        ("of members", limits.format_bytes(dataset.total_bytes)),
        ("shard" if len(dataset.document.shards) == 1 else "shards", f"{len(dataset.document.shards):,}"),
        ("with captions", f"{(count - table['text'].null_count) / count:.0%}" if len(dataset) else "0%"),
        ("with sound", f"{(count - table['audio_codec'].null_count) / count:.0%}" if len(dataset) else "0%"),
    ]
    items = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in figures)
    spread = [
        _panel("Duration", histogram.svg(histogram.bins(_values(table["duration"])), _seconds, "durations")),
        _panel("Size", histogram.svg(histogram.bins(_values(table["bytes"])), _size, "sizes")),
    ]
    shares = [
        _panel("Resolution", _shares(table, ("width", "height"), lambda row: f"{row[0]} × {row[1]}")),
        _panel("Frame rate", _shares(table, ("fps_numerator", "fps_denominator"), _rate)),
        _panel("Video codec", _shares(table, ("video_codec",), lambda row: str(row[0]))),
        _panel("Audio codec", _shares(table, ("audio_codec",), lambda row: str(row[0]))),
    ]
    return f'<dl class="figures">{items}</dl>\n{_panels("spread", spread)}{_panels("shares", shares)}'


def _values(column: Any) -> Any:
    return np.asarray(column.combine_chunks().to_numpy(zero_copy_only=False), np.float64)


def _panels(kind: str, panels: Sequence[str]) -> str:
    return f'<div class="panels {kind}">\n{"".join(panels)}</div>\n'


def _panel(title: str, inside: str) -> str:
    return f'<section class="panel"><h2>{title}</h2>{inside}</section>\n'


def _shares(table: Any, columns: tuple[str, ...], words: Any) -> str:
    there = table.select(columns).filter(pc.is_valid(table[columns[0]]))
    grouped = there.group_by(list(columns), use_threads=False).aggregate([([], "count_all")]).to_pylist()
    rows = sorted(
        ((words([row[c] for c in columns]), row["count_all"]) for row in grouped), key=lambda r: (-r[1], r[0])
    )
    if len(rows) > _ROWS:
        rows = [*rows[: _ROWS - 1], (f"{len(rows) - _ROWS + 1} others", sum(n for _, n in rows[_ROWS - 1 :]))]
    if len(there) < len(table):
        rows.append(("none", len(table) - len(there)))
    most = max((n for _, n in rows), default=1)
    lines = (
        f'<tr><td>{html.escape(label)}</td><td class="share"><i style="width:{100 * n / most:.1f}%"></i></td>'
        f'<td class="number">{n:,}</td></tr>'
        for label, n in rows
    )
    return f"<table>{''.join(lines)}</table>" if rows else '<p class="quiet">none</p>'


def _rate(row: Sequence[int]) -> str:
    return f"{float(Fraction(row[0], row[1])):.2f}".rstrip("0").rstrip(".")


def _seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    return f"{value / 60:.3g} min" if value >= 600 else f"{value:.3g} s"


def _size(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B"


# --- samples


def _card(shown: Shown, frames: int) -> str:
    sample, pictures = shown.sample, shown.pictures
    parts = [_look(pictures, frames), f'<div class="key">{html.escape(sample.key)}</div>']
    if sample.text:
        text = sample.text if len(sample.text) <= _CAPTION else sample.text[:_CAPTION] + "…"
        parts.append(f'<p class="caption">{html.escape(text)}</p>')
    parts.append(f'<p class="facts">{html.escape(_facts(sample))}</p>')
    if pictures.fault and (pictures.jpegs or pictures.peaks):
        parts.append(f'<p class="bad">{html.escape(pictures.fault)}</p>')
    return f'<li class="sample">{"".join(parts)}</li>\n'


def _look(pictures: Pictures, frames: int) -> str:
    if pictures.jpegs:
        shape = f"--shape:{max(pictures.width / max(1, pictures.height), _NARROWEST):.3f};--count:{frames}"
        images = "".join(
            f'<img src="data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}" alt="" loading="lazy">'
            for jpeg in pictures.jpegs
        )
        return f'<div class="strip" style="{shape}">{images}</div>'
    if pictures.peaks:
        return f'<div class="strip sound">{_outline(pictures.peaks)}</div>'
    return f'<div class="strip none">{html.escape(pictures.fault or "nothing to show")}</div>'


def _outline(peaks: Sequence[float]) -> str:
    loudest = max(max(peaks), 0.05)
    strokes = "".join(
        f"M{4 * i + 2} {30 - 27 * peak / loudest:.1f}V{30 + 27 * peak / loudest + 0.1:.1f}"
        for i, peak in enumerate(peaks)
    )
    return f'<svg viewBox="0 0 {4 * len(peaks)} 60" role="img" aria-label="sound"><path d="{strokes}"/></svg>'


def _facts(sample: Sample) -> str:
    parts = [_length(sample.duration)]
    if sample.video is not None:
        v = sample.video
        parts.append(f"{v.codec} {v.width} × {v.height}, {_rate((v.fps.numerator, v.fps.denominator))} fps")
        if v.rotation:
            parts.append(f"turned by {v.rotation}°")
    if sample.audio is not None:
        parts.append(f"{sample.audio.codec} {sample.audio.sample_rate / 1000:g} kHz × {sample.audio.channels}")
    parts.append(limits.format_bytes(sum(member.length for member in sample.members)))
    return " · ".join(parts)


def _length(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 60:
        return (
            f"{whole // 60}:{whole % 60:02}"
            if whole < 3600
            else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
        )
    return f"{seconds:.1f} s"
