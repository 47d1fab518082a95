"""What a closing loader does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.batch.batch import Output
from headrace.loaders.batch.prefetcher import BatchExecutor
from headrace.loaders.batch.sample_builder import PlannedBatch, PlannedRead
from headrace.loaders.cancellation import Cancelled, cancelled_by, check_cancelled
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.base import Request
from headrace.loaders.decode.convert import FullSizeCanvas
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.interfaces import ProcessedSample, SampleLayout, SampleRef


def test_outside_of_a_block_nothing_is_given_up() -> None:
    event = threading.Event()
    event.set()
    check_cancelled()
    with pytest.raises(Cancelled), cancelled_by(event):
        check_cancelled()
    check_cancelled()


def test_a_decoder_stops_after_a_few_pictures(
    media: Path, info_of: Callable[[bytes, str], VideoInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (media / "nasa_h264_aac.mp4").read_bytes()
    info, closing, drawn = info_of(data, "mp4"), threading.Event(), []
    draw = FullSizeCanvas.draw

    def last(canvas: FullSizeCanvas, number: int, frame: Any) -> None:
        draw(canvas, number, frame)
        drawn.append(number)
        closing.set()

    monkeypatch.setattr(FullSizeCanvas, "draw", last)
    request = Request(memoryview(data), info, Wanted("index", tuple(range(40)), info.key_frames[0]))
    with pytest.raises(Cancelled), cancelled_by(closing):
        PyAVDecoder().decode([request])
    assert 1 <= len(drawn) < 10


def test_closing_ends_long_samples_and_begins_no_others() -> None:
    begun, go, steps = threading.Event(), threading.Event(), []

    def make(refs: Sequence[SampleRef], *_: object) -> list[ProcessedSample]:
        for step in range(1000):
            check_cancelled()
            steps.append(step)
            begun.set()
            assert go.wait(60)
        raise AssertionError("it was not cancelled")

    prefetcher = BatchExecutor(
        make, layout=SampleLayout(("video",)), output=Output(torch.device("cpu"), pinned=False), num_threads=1
    )
    ref: Any = None
    prefetcher.start(PlannedBatch([ref] * 4, [PlannedRead({}, 0)] * 4))
    assert begun.wait(60)
    prefetcher.stop()
    go.set()
    prefetcher.close()
    assert steps == [0]
