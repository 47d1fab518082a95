"""`preview` makes one page that shows the contents of a dataset or of a view.

Purpose: look at data before training on it, and pass the page on. The page is one file without scripts or network
access.
Invariants: figures and histograms cover all samples. Pictures cover at most `limit` samples, evenly spread. The same
dataset gives the same page. Worker processes with time limits make the pictures. The pictures of a page have at most
`PICTURE_BYTES`.
Failure behaviour: if a sample cannot be shown, the page gives the reason. Limits that are too large raise `UsageError`.
Errors of the store pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, DeadlineError, UsageError
from headrace.dataio.shards.contract import Sample
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.look.preview_page import Shown, page
from headrace.dataio.shards.workers import media_jobs
from headrace.dataio.shards.workers.decoding import ask, seconds_for, set_aside
from headrace.dataio.shards.workers.media_jobs import Pictures, PicturesJob
from headrace.dataio.shards.workers.process import WorkerPool, run_module

MOST_SAMPLES, MOST_FRAMES = 1000, 16
PICTURE_BYTES = 32 * limits.MIB
_PEAKS = 96


def preview(
    dataset: Dataset,
    *,
    limit: int = 48,
    frames: int = 4,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Return the page for this dataset or view, as HTML.

    Args:
        dataset: the dataset or view to show.
        limit: the most samples to show, from 1 to 1,000.
        frames: the number of pictures per sample, from 1 to 16.
        workers: the number of decoding processes. The default is one per core.
        progress: a function of the number of samples done and their total.
    """
    if not 1 <= limit <= MOST_SAMPLES or not 1 <= frames <= MOST_FRAMES:
        raise UsageError(
            f"a page shows 1 to {MOST_SAMPLES} samples with 1 to {MOST_FRAMES} pictures each",
            hint="choose samples with --where",
        )
    count = min(limit, len(dataset))
    samples = dataset.samples([i * len(dataset) // count for i in range(count)]) if count else []
    return page(dataset, _shown(dataset, samples, frames, workers, progress), frames)


def _shown(
    dataset: Dataset,
    samples: list[Sample],
    frames: int,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[Shown]:
    found, total = list[Shown](), 0
    with (
        WorkerPool(run_module(media_jobs.WORKER), media_jobs.HELLO, workers) as pool,
        ThreadPoolExecutor(pool.workers) as threads,
    ):
        for pictures in threads.map(lambda sample: _look(dataset, sample, frames, pool), samples):
            sample = samples[len(found)]
            total += sum(map(len, pictures.jpegs))
            if total > PICTURE_BYTES:
                pictures = Pictures(fault="left out: the page would become too large")
            found.append(Shown(sample, pictures))
            if progress is not None:
                progress(len(found), len(samples))
    return found


def _look(dataset: Dataset, sample: Sample, frames: int, pool: WorkerPool) -> Pictures:
    if sample.video is not None:
        job = PicturesJob(
            path="",
            video_stream=sample.video.stream,
            rotation=sample.video.rotation,
            count=frames,
            width=320,
            height=240,
        )
        ext = sample.video.ext
    elif sample.audio is not None:
        job = PicturesJob(path="", audio_stream=sample.audio.stream, samples=sample.audio.samples, count=_PEAKS)
        ext = sample.audio.ext
    else:
        return Pictures(fault="it has neither pictures nor sound")
    try:
        with set_aside(dataset.store, sample, ext) as path:
            answer = ask(pool, msgspec.structs.replace(job, path=path), seconds_for(sample))
    except (CorruptionError, DeadlineError, CapacityError) as error:
        return Pictures(fault=error.message)
    assert isinstance(answer, Pictures)
    return answer
