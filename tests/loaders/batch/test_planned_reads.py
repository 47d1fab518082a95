"""The processor is asked once what is needed of a long file."""

from __future__ import annotations

import wave
from collections import Counter

import numpy as np
import pytest

from headrace.dataio import pack
from headrace.loaders import AudioLoader, Window
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.processors.audio import WindowProcessor

RATE = 8_000


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three of two minutes, long enough to be read in part."""
    folder, url = tmp_path_factory.mktemp("wav"), tmp_path_factory.mktemp("long") / "ds"
    for number in range(3):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(np.random.default_rng(number).integers(-9000, 9000, 120 * RATE).astype(np.int16).tobytes())
    pack([folder], url, workers=1).close()
    return str(url)


def test_what_a_part_of_a_long_file_needs_is_asked_once(recordings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found, needs = Counter[tuple[int, int]](), list[bool](), WindowProcessor.needs

    def counted(self: WindowProcessor, ref: SampleRef) -> object:
        answer = needs(self, ref)
        asked[ref.epoch, ref.virtual] += 1
        found.append(answer["wav"] is not None)
        return answer

    monkeypatch.setattr(WindowProcessor, "needs", counted)
    window = Window(1.0, per_sample=20)
    with AudioLoader(
        recordings, 4, window=window, sample_rate=RATE, sidecar=None, num_threads=2, prefetch_batches=1
    ) as loader:
        seen = sum(len(batch["key"]) for _ in range(2) for batch in loader)
    assert all(found)
    assert seen == 120
    assert [asked[epoch, number] for epoch in range(2) for number in range(60)] == [1] * 120
