"""Clips and windows from long files: the same to the bit as when the files are read whole, from a small part of their bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.audio.frame import AudioFrame
from msgspec.structs import replace

from dataio import pack
from dataio.core import metrics
from dataio.shards.contract import Sample
from dataio.shards.dataset import Dataset
from loaders import AudioSpec, Clip, VideoLoader
from loaders.decode import isolated
from loaders.partial import needed
from loaders.partial.file import PartialFile
from tests.loaders import plain

FRAMES, GROUP, RATE = 900, 12, 48_000
CLIP = Clip(4, 2, per_video=5)
FILMS: dict[str, dict[str, str]] = {
    "front.mp4": {"movflags": "faststart"},
    "back.mp4": {},
    "film.mkv": {},
    "fragments.mp4": {"movflags": "frag_keyframe+empty_moov+default_base_moof"},
}
SOUNDS = {"long.wav": "pcm_s16le", "long.flac": "flac", "long.mp3": "libmp3lame", "long.m4a": "aac"}


def film() -> bytes:
    """36 s of noise with sound, some megabytes: every frame and every moment differ."""
    target, noise = io.BytesIO(), np.random.default_rng(1)
    with av.open(target, "w", format="matroska") as output:
        video: Any = output.add_stream(
            "libx264", rate=25, options={"g": str(GROUP), "bf": "2", "preset": "ultrafast", "qp": "20"}
        )
        video.width, video.height, video.pix_fmt = 96, 80, "yuv420p"
        sound: Any = output.add_stream("aac", rate=RATE, layout="mono")
        for number in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(noise.integers(0, 256, (80, 96, 3), np.uint8), format="rgb24")
            frame.pts = number
            output.mux(video.encode(frame))
            samples = noise.integers(-9999, 9999, (1, RATE // 25)).astype(np.int16)
            heard = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            heard.sample_rate, heard.pts = RATE, number * (RATE // 25)
            output.mux(sound.encode(heard))
        output.mux(video.encode(None))
        output.mux(sound.encode(None))
    return target.getvalue()


def copied(data: bytes, name: str, options: dict[str, str], folder: Path) -> None:
    """The same packets in another container."""
    with av.open(io.BytesIO(data)) as source, av.open(str(folder / name), "w", options=options) as output:
        streams = {stream.index: output.add_stream_from_template(stream) for stream in source.streams}
        for packet in source.demux():
            if packet.size:
                packet.stream = streams[packet.stream.index]
                output.mux(packet)


def recorded(path: Path, codec: str) -> None:
    """40 s of noise and a tone that rises."""
    time = np.arange(40 * RATE) / RATE
    samples = 0.3 * np.sin(2 * np.pi * (200 + 40 * time) * time) + 0.3 * np.random.default_rng(2).uniform(
        -1, 1, len(time)
    )
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream(codec, rate=RATE, layout="mono")
        stream.bit_rate = 320_000
        for at in range(0, len(samples), 4800):
            frame = AudioFrame.from_ndarray(
                (samples[None, at : at + 4800] * 32767).astype(np.int16), format="s16", layout="mono"
            )
            frame.sample_rate, frame.pts = RATE, at
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of films, `ds`."""
    folder = tmp_path_factory.mktemp("films")
    (folder / "clips").mkdir()
    data = film()
    for name, options in FILMS.items():
        copied(data, name, options, folder / "clips")
        (folder / "clips" / name).rename(folder / "clips" / f"{name.replace('.', '-')}.{name.rpartition('.')[2]}")
    pack([folder / "clips"], folder / "ds", workers=1).close()
    return folder


@pytest.fixture(scope="session")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of long recordings, `ds`."""
    folder = tmp_path_factory.mktemp("sounds")
    (folder / "clips").mkdir()
    for name, codec in SOUNDS.items():
        recorded(folder / "clips" / f"{codec}-{name}", codec)
    pack([folder / "clips"], folder / "ds", workers=1).close()
    return folder


def read() -> float:
    """Bytes that this process read from local files so far."""
    return metrics.store_bytes.labels("posix", "read")._value.get()


def clips(url: Any, **options: Any) -> list[tuple[str, float, torch.Tensor, torch.Tensor]]:
    """Key, time, pictures and sound of an epoch's clips."""
    sizes = {
        "size": (32, 32),
        "audio": AudioSpec(16_000, seconds=0.5),
        "sidecar": None,
        "threads": 2,
        "seed": 3,
    } | options
    with VideoLoader(url, 2, clip=CLIP, drop_last=False, **sizes) as loader:
        return [
            (key, clip, video.clone(), audio.clone())
            for batch in loader
            for key, clip, video, audio in zip(
                batch["key"], batch["clip"].tolist(), batch["video"], batch.get("audio", batch["video"]), strict=True
            )
        ]


def alike(some: Any, others: Any) -> bool:
    """Whether two epochs are the same, to the bit."""
    return len(some) == len(others) and all(
        one[:2] == other[:2] and all(map(torch.equal, one[2:], other[2:]))
        for one, other in zip(some, others, strict=True)
    )


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are read whole, as those of datasets without pieces are."""
    with monkeypatch.context() as context:
        context.setattr(needed, "member_of", lambda sample, ext: None)
        yield


@pytest.fixture(scope="session")
def expected(films: Path) -> Any:
    """The clips of whole files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needed, "member_of", lambda sample, ext: None)
        return clips(films / "ds")


def test_clips_and_their_sound_are_those_of_whole_files(films: Path, expected: Any) -> None:
    with Dataset(str(films / "ds")) as dataset:
        assert all(sample.members[0].pieces for sample in dataset.samples(range(len(dataset))))
    assert alike(clips(films / "ds"), expected)


@pytest.mark.parametrize("name", ["front-mp4", "back-mp4", "film-mkv"])
def test_a_clip_costs_a_small_part_of_its_file(films: Path, name: str) -> None:
    with Dataset(str(films / "ds")) as dataset:
        size, before = dataset.find(name).members[0].length, read()
        seen = len(clips(dataset.where(f"key = '{name}'")))
    assert read() - before < (seen + 4) * size / 4  # a few more are read ahead


def test_clips_are_those_of_plain_decoding(films: Path) -> None:
    with Dataset(str(films / "ds")) as dataset:
        images, times = plain.frames(dataset.read(dataset.find("front-mp4"), "mp4"))
        alone = dataset.where("key = 'front-mp4'")
        loader = VideoLoader(alone, 1, clip=CLIP, size=None, sidecar=None, threads=2)
        for batch in loader:
            for start, video in zip(batch["clip"].tolist(), batch["video"], strict=True):
                first = min(range(FRAMES), key=lambda n: abs(float(times[n]) - start))
                wanted = np.stack(images[first : first + 8 : 2]).transpose(0, 3, 1, 2)
                assert np.array_equal(video.numpy(), wanted)
        loader.close()


@pytest.mark.parametrize("name", ["front-mp4", "back-mp4", "film-mkv"])
def test_what_a_clip_reads_was_foreseen(films: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missed, foreseen = list[int](), list[int]()
    fetch_on, foresee = PartialFile._fetch_on, PartialFile.foresee
    monkeypatch.setattr(PartialFile, "_fetch_on", lambda self, number: (missed.append(number), fetch_on(self, number)))
    monkeypatch.setattr(PartialFile, "foresee", lambda self, runs: (foreseen.append(len(runs)), foresee(self, runs)))
    with Dataset(str(films / "ds")) as dataset:
        clips(dataset.where(f"key = '{name}'"), audio=None)
    assert len(foreseen) >= CLIP.per_video
    assert not missed


@pytest.mark.parametrize("at", [-1, 0, 10**9])
@pytest.mark.parametrize("head", [(), ((0, 1),), ((3, 2), (7, 1))])
def test_wrong_hints_change_nothing(
    films: Path, expected: Any, at: int, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Dataset.samples

    def misled(self: Dataset, numbers: Any) -> list[Sample]:
        return [_misled(sample, at, head) for sample in samples(self, numbers)]

    monkeypatch.setattr(Dataset, "samples", misled)
    monkeypatch.setattr(needed, "reads_part_of_video", lambda *_, **__: True)
    assert alike(clips(films / "ds"), expected)


def _misled(sample: Sample, at: int, head: Any) -> Sample:
    video, (member,) = sample.video, sample.members
    assert video is not None
    assert member.pieces is not None
    keys = tuple(replace(key, at=at) for key in video.key_frames)
    member = replace(member, pieces=replace(member.pieces, head=head))
    return replace(sample, video=replace(video, key_frames=keys), members=(member,))


def test_processes_that_may_crash_get_what_they_ask_for(
    films: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alike(clips(films / "ds", isolate=60.0), expected)
    whole, nothing = list[int](), ((0, 1),)
    monkeypatch.setattr(isolated, "_ASKED", 2)
    monkeypatch.setattr(needed, "runs", lambda member, spans: nothing)
    get = PartialFile.__getitem__
    monkeypatch.setattr(PartialFile, "__getitem__", lambda self, where: (whole.append(1), get(self, where))[1])
    assert alike(clips(films / "ds", isolate=60.0), expected)
    assert whole  # of one file at least so much was missing that all of it was sent
