"""One HTML page that shows the contents of a dataset or of a view: its statistics, and pictures of some samples.

Purpose: users look at data before they train on it, and can share the page. The page is one file. It has no scripts and
needs no network.
Invariants:

* Statistics and histograms cover all samples. Pictures cover at most `limit` samples, spread evenly over the dataset.
* The same dataset gives the same page.
* Worker processes with time limits decode the pictures. All pictures of a page have at most `PICTURE_BYTES` in total.
* All text from the dataset is escaped. The page is readable from a width of 400 pixels, in light and dark mode.
* A histogram has at most `MAX_BINS` bins with round edges: multiples of 1, 2 or 5 times a power of ten. If the values
  span more than two orders of magnitude, the bins are logarithmic (1, 2, 5, 10, 20 and so on). Every value falls into
  exactly one bin.

Failure behaviour: if a sample cannot be shown, the page gives the reason. Limits that are too large raise `UsageError`.
Errors of the store are passed on.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, DeadlineError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.workers import jobs
from headrace.dataio.shards.workers.jobs import Pictures, PicturesJob, ask, local_copy, part_of, seconds_for
from headrace.dataio.shards.workers.worker_pool import WorkerPool

MAX_SAMPLES, MAX_FRAMES = 1000, 16
PICTURE_BYTES = 32 * limits.MIB
_PEAKS = 96
_TABLE_ROWS = 8
_CAPTION_CHARACTERS = 600
_MIN_ASPECT_RATIO = 0.75
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
MAX_BINS = 24
_WIDTH, _HEIGHT, _BASE, _TOP = 480, 150, 124, 20
_TICK_SPACING = 96
_SINGLE_VALUE_RANGE = 1e-9
"""The range of the values, divided by the largest value, below which the values count as one value.

Floats cannot represent the edges of bins between such values.
"""


def preview(
    dataset: Dataset,
    *,
    limit: int = 48,
    frames: int = 4,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Make one HTML page that shows the statistics of a dataset or view, and pictures of some samples.

    Args:
        dataset (Dataset): The dataset or view to show.
        limit (int): The most samples to show, from 1 to 1,000. They are spread evenly over the dataset. Default: 48.
        frames (int): The number of pictures of each video, from 1 to 16. Default: 4.
        workers (int | None): The number of decoding processes. Default: one for each core.
        progress (Callable[[int, int], None] | None): A function of the number of samples done and their total.
            Default: None.

    Returns:
        str: The page.

    Raises:
        UsageError: `limit` or `frames` is out of range.

    Example:
        >>> with Dataset(clips) as dataset:
        ...     preview(dataset, limit=2, frames=1, workers=1)[:15]
        '<!doctype html>'
    """
    if not 1 <= limit <= MAX_SAMPLES or not 1 <= frames <= MAX_FRAMES:
        raise UsageError(
            f"a page shows 1 to {MAX_SAMPLES} samples with 1 to {MAX_FRAMES} pictures each",
            hint="choose samples with --where",
        )
    count = min(limit, len(dataset))
    samples = dataset.samples([i * len(dataset) // count for i in range(count)]) if count else []
    return page(dataset, _decode_pictures(dataset, samples, frames, workers, progress), frames)


def _decode_pictures(
    dataset: Dataset,
    samples: list[Sample],
    frames: int,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[PreviewSample]:
    shown, total = list[PreviewSample](), 0
    with (
        WorkerPool(jobs.COMMAND, jobs.HELLO, workers) as pool,
        ThreadPoolExecutor(pool.workers) as threads,
    ):
        for pictures in threads.map(lambda sample: _pictures_of(dataset, sample, frames, pool), samples):
            sample = samples[len(shown)]
            total += sum(map(len, pictures.jpegs))
            if total > PICTURE_BYTES:
                pictures = Pictures(fault="left out: the page would become too large")
            shown.append(PreviewSample(sample, pictures))
            if progress is not None:
                progress(len(shown), len(samples))
    return shown


def _pictures_of(dataset: Dataset, sample: Sample, frames: int, pool: WorkerPool) -> Pictures:
    if sample.video is not None:
        job = PicturesJob(
            path="",
            video_stream=sample.video.stream,
            rotation=sample.video.rotation,
            count=frames if sample.video.frames > 1 else 1,
            width=320,
            height=240,
            part=part_of(sample.video),
        )
        ext = sample.video.ext
    elif sample.audio is not None:
        job = PicturesJob(path="", audio_stream=sample.audio.stream, samples=sample.audio.samples, count=_PEAKS)
        ext = sample.audio.ext
    else:
        return Pictures(fault="it has neither pictures nor sound")
    try:
        with local_copy(dataset.store, sample, ext) as path:
            answer = ask(pool, msgspec.structs.replace(job, path=path), seconds_for(sample))
    except (CorruptionError, DeadlineError, CapacityError) as error:
        return Pictures(fault=error.message)
    assert isinstance(answer, Pictures)
    return answer


# --- the page


@dataclass(frozen=True, slots=True)
class PreviewSample:
    """A sample and its pictures."""

    sample: Sample
    pictures: Pictures


def page(dataset: Dataset, shown: Sequence[PreviewSample], frames: int) -> str:
    """Return the HTML page. Each sample has a row with room for `frames` pictures."""
    style = resources.files("headrace.dataio.shards").joinpath("preview.css").read_text(encoding="utf-8")
    name = html.escape(dataset.name)
    cards = "".join(_card(one, frames) for one in shown)
    coverage = (
        f"{len(shown):,} of {len(dataset):,}, evenly spread" if len(shown) < len(dataset) else f"all {len(shown):,}"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} · version {dataset.version}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{name}</h1>\n{_header(dataset)}</header>\n{_statistics(dataset)}"
        f'<h2>Samples <small>{coverage}</small></h2>\n<ul class="samples">\n{cards}</ul>\n'
        f"<footer>made by headrace preview · digest {html.escape(dataset.digest[:16])}</footer>\n</body>\n</html>\n"
    )


def _header(dataset: Dataset) -> str:
    document = dataset.document
    message = f" · {html.escape(document.message)}" if document.message else ""
    when = html.escape(document.created.replace("T", " ").replace("+00:00", " UTC"))
    lines = [f'<p class="quiet">version {dataset.version} of {when}{message} · {html.escape(dataset.url)}</p>']
    if dataset.view is not None:
        lines += [f"<p>only where <code>{html.escape(condition)}</code></p>" for condition in dataset.lineage.where]
    return "\n".join(lines) + "\n"


def _statistics(dataset: Dataset) -> str:
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
        _panel("Duration", histogram_svg(histogram(_values(table["duration"])), _seconds, "durations")),
        _panel("Size", histogram_svg(histogram(_values(table["bytes"])), _size, "sizes")),
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
    present = table.select(columns).filter(pc.is_valid(table[columns[0]]))
    grouped = present.group_by(list(columns), use_threads=False).aggregate([([], "count_all")]).to_pylist()
    rows = sorted(
        ((words([row[c] for c in columns]), row["count_all"]) for row in grouped), key=lambda r: (-r[1], r[0])
    )
    if len(rows) > _TABLE_ROWS:
        rows = [
            *rows[: _TABLE_ROWS - 1],
            (f"{len(rows) - _TABLE_ROWS + 1} others", sum(n for _, n in rows[_TABLE_ROWS - 1 :])),
        ]
    if len(present) < len(table):
        rows.append(("none", len(table) - len(present)))
    highest = max((n for _, n in rows), default=1)
    lines = (
        f'<tr><td>{html.escape(label)}</td><td class="share"><i style="width:{100 * n / highest:.1f}%"></i></td>'
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


def _card(shown: PreviewSample, frames: int) -> str:
    sample, pictures = shown.sample, shown.pictures
    parts = [_strip(pictures, frames), f'<div class="key">{html.escape(sample.key)}</div>']
    if sample.text:
        text = sample.text if len(sample.text) <= _CAPTION_CHARACTERS else sample.text[:_CAPTION_CHARACTERS] + "…"
        parts.append(f'<p class="caption">{html.escape(text)}</p>')
    parts.append(f'<p class="facts">{html.escape(_properties(sample))}</p>')
    if pictures.fault and (pictures.jpegs or pictures.peaks):
        parts.append(f'<p class="bad">{html.escape(pictures.fault)}</p>')
    return f'<li class="sample">{"".join(parts)}</li>\n'


def _strip(pictures: Pictures, frames: int) -> str:
    if pictures.jpegs:
        shape = f"--shape:{max(pictures.width / max(1, pictures.height), _MIN_ASPECT_RATIO):.3f};--count:{frames}"
        images = "".join(
            f'<img src="data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}" alt="" loading="lazy">'
            for jpeg in pictures.jpegs
        )
        return f'<div class="strip" style="{shape}">{images}</div>'
    if pictures.peaks:
        return f'<div class="strip sound">{_waveform(pictures.peaks)}</div>'
    return f'<div class="strip none">{html.escape(pictures.fault or "nothing to show")}</div>'


def _waveform(peaks: Sequence[float]) -> str:
    loudest = max(max(peaks), 0.05)
    strokes = "".join(
        f"M{4 * i + 2} {30 - 27 * peak / loudest:.1f}V{30 + 27 * peak / loudest + 0.1:.1f}"
        for i, peak in enumerate(peaks)
    )
    return f'<svg viewBox="0 0 {4 * len(peaks)} 60" role="img" aria-label="sound"><path d="{strokes}"/></svg>'


def _properties(sample: Sample) -> str:
    parts = [_clock(sample.duration)]
    if sample.video is not None:
        v = sample.video
        parts.append(f"{v.codec} {v.width} × {v.height}, {_rate((v.fps.numerator, v.fps.denominator))} fps")
        if v.rotation:
            parts.append(f"turned by {v.rotation}°")
    if sample.audio is not None:
        parts.append(f"{sample.audio.codec} {sample.audio.sample_rate / 1000:g} kHz × {sample.audio.channels}")
    parts.append(limits.format_bytes(sum(member.length for member in sample.members)))
    return " · ".join(parts)


def _clock(seconds: float) -> str:
    total = int(seconds)
    if total >= 60:
        return (
            f"{total // 60}:{total % 60:02}"
            if total < 3600
            else f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"
        )
    return f"{seconds:.1f} s"


# --- histograms


@dataclass(frozen=True, slots=True)
class Histogram:
    """The bins: `edges` has one more number than `counts`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def histogram(values: npt.ArrayLike) -> Histogram:
    """Sort the values into bins with round edges. Values that are negative or not finite are ignored."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite) & (finite >= 0)]
    if not len(finite):
        return Histogram((), ())
    low, high = float(finite.min()), float(finite.max())
    edges = _logarithmic_edges(low, high) if low > 0 and high / low > 100 else _linear_edges(low, high)
    counts, _ = np.histogram(finite, edges)
    return Histogram(tuple(edges), tuple(int(n) for n in counts))


def _linear_edges(low: float, high: float) -> list[float]:
    span, scale = high - low, max(high, 1.0)
    if span < scale * _SINGLE_VALUE_RANGE:
        span = scale
    least = span / (MAX_BINS - 2)
    size = 10.0 ** math.floor(math.log10(least))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if size * factor >= least)
    first = math.floor(low / step)
    last = max(first + 1, math.floor(high / step) + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _logarithmic_edges(low: float, high: float) -> list[float]:
    edges = [
        10.0**e * f for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2) for f in (1, 2, 5)
    ]
    first = max(i for i, edge in enumerate(edges) if edge <= low)
    last = min(i for i, edge in enumerate(edges) if edge > high)
    edges = edges[first : last + 1]
    while len(edges) - 1 > MAX_BINS:
        edges = [*edges[:-1:2], edges[-1]]
    return edges


def histogram_svg(bins: Histogram, label: Callable[[float], str], quantity: str) -> str:
    """Draw the bins as SVG.

    `label` gives the text of an edge, and `quantity` names the values. Neither is escaped, so both must be safe in HTML.
    """
    if not bins.counts:
        return '<p class="quiet">none</p>'
    width, highest = _WIDTH / len(bins.counts), max(bins.counts)
    bars = []
    for i, count in enumerate(bins.counts):
        height = 0.0 if not count else max(2.0, (_BASE - _TOP) * count / highest)
        at = f'x="{i * width + 0.75:.2f}" width="{max(1.0, width - 1.5):.2f}"'
        title = f"{label(bins.edges[i])} to {label(bins.edges[i + 1])}: {count}"
        bars.append(f'<g><rect class="hit" {at} y="0" height="{_BASE}"><title>{title}</title></rect>')
        bars.append(f'<rect class="bar" {at} y="{_BASE - height:.1f}" height="{height:.1f}" rx="1.5"/></g>')
    ticks = "".join(_tick(bins.edges, i, label) for i in _ticks(bins.edges))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{quantity}, by {len(bins.counts)} bins">'
        f'{"".join(bars)}<line class="axis" x1="0" x2="{_WIDTH}" y1="{_BASE}" y2="{_BASE}"/>'
        f'<text class="most" x="0" y="10">{highest:,}</text>{ticks}</svg>'
    )


def _ticks(edges: Sequence[float]) -> list[int]:
    """Return the edges that get a label: the first, the last, and some between, one per `_TICK_SPACING` pixels."""
    last = len(edges) - 1
    step = max(1, math.ceil(last * _TICK_SPACING / _WIDTH))
    return [*(i for i in range(0, last, step) if i + step <= last), last]


def _tick(edges: Sequence[float], i: int, label: Callable[[float], str]) -> str:
    x = _WIDTH * i / (len(edges) - 1)
    anchor = "start" if not i else "end" if i == len(edges) - 1 else "middle"
    return f'<text x="{x:.1f}" y="{_BASE + 18}" text-anchor="{anchor}">{label(edges[i])}</text>'
