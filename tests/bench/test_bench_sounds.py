"""`headrace bench loader` of sound: what recordings are, and that all peers take the same windows."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest

from headrace.bench.peers import audio
from headrace.bench.peers.source import FLOOR, OURS, Source, batches, ffmpeg_libraries, make
from headrace.bench.workloads.loader import measure
from headrace.dataio import Dataset
from headrace.loaders.audio.decode import decode_audio
from headrace.loaders.audio.spec import AudioSpec

SHORT = replace(audio.KINDS[0], name="tiny", shortest=2, longest=4, window=1)
LONG = replace(audio.KINDS[2], name="tiny", shortest=62, longest=70, window=2, per_file=2, stretch=6)
MELS = replace(SHORT, n_mels=8)
PRIMING = 400
"""Samples: encoders of Opus, MP3 and AAC put up to so much before the sound, which some count and others do not."""


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short") / "tiny"
    make(SHORT, folder, 4, lambda *_: None)
    return folder


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "tiny"
    make(LONG, folder, 4, lambda *_: None)
    return folder


def lasts(path: Path) -> float:
    with av.open(str(path)) as file:
        return sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0))


def test_recordings_are_as_long_as_their_kind_says_and_not_alike(short: Path, long: Path) -> None:
    for kind, folder in ((SHORT, short), (LONG, long)):
        paths = sorted((folder / "clips").iterdir())
        assert [path.suffix[1:] for path in paths] == [kind.forms[n % len(kind.forms)].ext for n in range(4)]
        for number, path in enumerate(paths):
            assert lasts(path) == pytest.approx(kind.seconds(number), abs=0.1), path.name
        assert len({path.read_bytes() for path in paths}) == 4
        assert sorted(path.name for path in folder.iterdir()) == ["clips", "dataset"]


@pytest.mark.parametrize("name", [OURS, FLOOR])
def test_an_epoch_has_some_windows_of_each_recording(short: Path, long: Path, name: str) -> None:
    for kind, folder in ((SHORT, short), (MELS, short), (LONG, long)):
        assert measure(name, Source(folder), kind)["samples_per_s"] > 0
        assert sum(len(batch) for batch in batches(name, Source(folder), kind)) == 4 * kind.per_file


def test_pyav_and_our_decoder_give_the_same_sound(short: Path, long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.75)
    for kind, folder in ((SHORT, short), (LONG, long)):
        with Dataset(folder / "dataset") as dataset:
            infos = {f"{sample.key}.{sample.audio.ext}": sample.audio for sample in dataset if sample.audio}
        for name in Source(folder).files():
            spec = AudioSpec(audio.RATE, seconds=kind.window)
            data = memoryview(Source(folder).read(name))
            ours, _ = decode_audio(data, infos[name], Fraction(3, 4), spec, spec.samples(), True)
            with Source(folder).opened(name) as path:
                theirs = audio.pyav(path, kind)
            assert theirs.shape == (kind.per_file, *kind.shape)
            assert abs(offset(theirs[0, 0].numpy(), ours[0])) <= PRIMING, name


def offset(one: Any, other: Any) -> int:
    """By how many samples, in hundreds, one has to be moved to be nearest to the other."""
    size, places = len(other) - 1600, range(-800, 801, 100)
    return min(places, key=lambda by: float(abs(one[800 + by : 800 + by + size] - other[800 : 800 + size]).mean()))


PEERS = """
import random
import sys
from pathlib import Path

from headrace.bench.peers import audio
from headrace.bench.peers.source import Source, batches
from tests.bench.test_bench_sounds import LONG, MELS, PRIMING, SHORT, offset

random.uniform = lambda *_: 0.75
for kind, at in ((SHORT, sys.argv[1]), (LONG, sys.argv[2])):
    place = Source(Path(at))
    for number, name in enumerate(place.files()):
        expected = audio.pyav(place.link(name), kind)[0, 0]
        decoders = [audio.torchcodec, lambda source, kind: audio.spdl(source, kind, kind.seconds(number))]
        decoders += [audio.soundfile] if kind is SHORT else []
        for decode in decoders:
            found = decode(place.link(name), kind)
            assert found.shape == (kind.per_file, *kind.shape), (name, decode, found.shape)
            assert abs(offset(found[0, 0], expected)) <= PRIMING, (name, decode)
for kind in (SHORT, MELS):
    for name in ("SPDL, 2 threads", "soundfile, 2 threads", "torchcodec, 2 threads"):
        made = list(batches(name, Source(Path(sys.argv[1])), kind))
        assert sum(map(len, made)) == 4, name
        assert made[0].shape[1:] == kind.shape, name
"""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("spdl", "torchcodec", "soundfile", "soxr"))), reason="needs the peers"
)
def test_peers_take_the_same_windows(short: Path, long: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(ffmpeg_libraries(tmp_path))}
    command = [sys.executable, "-c", PEERS, str(short), str(long)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
