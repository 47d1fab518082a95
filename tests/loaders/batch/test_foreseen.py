"""What is needed of long files is reckoned once for each place, and what is read stays what it was."""

from __future__ import annotations

import wave
from collections import Counter

import numpy as np
import pytest

from headrace.dataio import pack
from headrace.loaders import AudioLoader, Window
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.works.foreseen import Foreseen
from headrace.loaders.works.windows import WindowWork

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


def test_each_place_of_a_long_file_is_reckoned_once_and_nothing_is_held_of_what_was_delivered(
    recordings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reckoned, found, reckon = Counter[tuple[int, int]](), list[bool](), WindowWork.partial
    made = list[Foreseen]()

    def counted(self: WindowWork, place: SampleRef) -> object:
        runs = reckon(self, place)
        reckoned[place.epoch, place.virtual] += 1
        found.append(bool(runs))
        return runs

    def watched(self: Foreseen, inner: WindowWork) -> None:
        begin(self, inner)
        made.append(self)

    begin = Foreseen.__init__
    monkeypatch.setattr(WindowWork, "partial", counted)
    monkeypatch.setattr(Foreseen, "__init__", watched)
    window = Window(1.0, per_sample=20)
    with AudioLoader(recordings, 4, window=window, sample_rate=RATE, sidecar=None, threads=2, prefetch=1) as loader:
        seen = sum(len(batch["key"]) for _ in range(2) for batch in loader)
        assert loader._ahead is not None
        (foreseen,) = made
        with loader._ahead._looking:  # no look-up is half done
            coming = [*loader._ahead._making, *loader._ahead._planned]
            assert 0 < len(foreseen._held) <= sum(len(one.places) for one in coming)
    assert all(found)
    assert seen == 120
    assert [reckoned[epoch, number] for epoch in range(2) for number in range(60)] == [1] * 120
