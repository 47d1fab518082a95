"""What the programs of examples/ train on."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from headrace.dataio import index
from tests.support.example_runs import write_media


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with videos, pictures with classes, and recordings, and an index of each: "videos-set" and so on."""
    folder = tmp_path_factory.mktemp("raw")
    write_media(folder)
    for number in range(40):
        (folder / "images" / f"{number}.json").write_text(json.dumps({"label": number % 2}))
    (folder / "speech").mkdir()
    for number in range(24):
        samples = np.random.default_rng(number).integers(-9000, 9000, 4000 + 900 * (number % 7), np.int16)
        with wave.open(str(folder / "speech" / f"{number}.wav"), "wb") as file:
            file.setnchannels(1), file.setsampwidth(2), file.setframerate(16_000)
            file.writeframes(samples.tobytes())
    for kind in ("videos", "images", "speech"):
        index(folder / kind, folder / f"{kind}-set").close()
    return folder
