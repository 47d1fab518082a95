"""Videos for the loader benchmarks: short clips, long clips with few key frames, and long videos with sound.

They are written as files, as a Headrace dataset (tars), and in litdata's format. A long video is a sequence of encoded
clips, copied and not encoded again, with a tune in AAC. Each clip begins with a key frame and lasts a whole number of
frames, so pictures come at an even rate across the seams.
Invariant: a file is a pure function of its number, and all candidates of a run read the same bytes. Each form is
written under another name and renamed when it is complete.
Failure behaviour: PyAV's exceptions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.workloads import audio, images

FPS = 25
FRAMES, STRIDE = 16, 2
DISTINCT = 12
"""The number of clips that are encoded. A dataset repeats them under other names; a long video joins them in random
order."""
BATCH = 8


@dataclass(frozen=True)
class Kind:
    """H.264 files of `seconds`, with a key frame every `gop` frames. A candidate delivers clips of `size` x `size`.

    A long video is `parts` of such files one after the other, with sound. An epoch has `per_file` clips of each file.
    `per_file` divides `BATCH`.
    """

    name: str
    seconds: int
    width: int
    height: int
    gop: int
    size: int
    parts: int = 1
    per_file: int = 1
    shard_bytes: int = 16 << 20

    @property
    def length(self) -> int:
        """Seconds of a file."""
        return self.seconds * self.parts

    @property
    def folder(self) -> str:
        return self.name

    @property
    def sought(self) -> bool:
        """Whether files are so long that a reader seeks in them."""
        return self.parts > 1

    @property
    def default(self) -> int:
        """Clips of an epoch by default."""
        return 608 if self.sought else 600

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a clip that a candidate delivers."""
        return FRAMES, 3, self.size, self.size

    @property
    def dtype(self) -> str:
        return "uint8"

    def described(self, files: int) -> str:
        """One line that describes an epoch."""
        clips = f"{self.length} s, {self.width}x{self.height}, a key frame every {self.gop}"
        clips = f"clips of {files} films of {clips}" if self.sought else f"clips of {clips}"
        return f"{files * self.per_file} H.264 {clips}; {FRAMES} frames, every {STRIDE}nd, to {self.size}²"

    @property
    def batch(self) -> int:
        """Files of a batch, for a loader that decodes all clips of a file together."""
        return BATCH // self.per_file

    @property
    def buffer(self) -> int:
        """Size of a shuffle buffer, in files. Long videos are too large for one."""
        return 1 if self.sought else 64


AnyKind = Kind | audio.Sound | images.Stills
_ALL: tuple[AnyKind, ...] = (
    Kind("short", 4, 320, 240, 12, 112),
    Kind("long", 10, 640, 360, 60, 224),
    Kind("films", 10, 640, 360, 60, 224, parts=60, per_file=8, shard_bytes=128 << 20),
    *audio.KINDS.values(),
    *images.KINDS.values(),
)
KINDS = {kind.name: kind for kind in _ALL}


def make(kind: AnyKind, folder: Path, count: int, tell: Any) -> None:
    """Write `count` files to `folder`/clips, unless they exist, and a dataset of them to `folder`/dataset."""
    from headrace.dataio import pack

    if not (folder / "clips").is_dir():
        with whole(folder / "clips") as clips:
            clips.mkdir()
            if isinstance(kind, audio.Sound):
                audio.write(kind, clips, count, tell)
            elif isinstance(kind, images.Stills):
                images.write(kind, clips, count, tell)
            else:
                (_long_videos if kind.sought else _clips)(kind, clips, count, tell)
    with whole(folder / "dataset") as dataset:
        pack([str(folder / "clips")], str(dataset), shard_bytes=kind.shard_bytes).close()


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Write a folder atomically: yield a folder, and rename it to `target` when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{target.name}.making")
    shutil.rmtree(made, ignore_errors=True)
    try:
        yield made
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _clips(kind: Kind, folder: Path, count: int, tell: Any) -> None:
    """Write clips: encode the first `DISTINCT`, and make the others links to them."""
    for number in range(count):
        path = folder / f"{number:05}.mp4"
        if number < DISTINCT:
            tell(f"making {kind.name} clips", number / DISTINCT)
            encode(path, kind, number)
        else:
            os.link(folder / f"{number % DISTINCT:05}.mp4", path)


def _long_videos(kind: Kind, folder: Path, count: int, tell: Any) -> None:
    """Write long videos, each of the same clips in another order."""
    parts = folder / "parts"
    parts.mkdir()
    _clips(kind, parts, DISTINCT, tell)
    there = sorted(parts.iterdir())
    encode_tune(tune := parts / "tune.mp4")
    for number in range(count):
        tell("joining them to long videos", number / count)
        order = np.random.default_rng(number).integers(0, len(there), kind.parts)
        join_clips(folder / f"{number:05}.mp4", [there[one] for one in order], kind.seconds, tune)
    shutil.rmtree(parts)


def encode(path: Path, kind: Kind, number: int, codec: str = "libx264") -> None:
    """Encode one clip: two patterns that move against each other, and a little noise."""
    import av

    options = {"g": str(kind.gop), "keyint_min": str(kind.gop), "threads": "1"}
    options |= (
        {"sc_threshold": "0", "preset": "veryfast"} if codec == "libx264" else {"deadline": "realtime", "cpu-used": "8"}
    )
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = kind.width, kind.height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, FPS)
        for index in range(kind.seconds * FPS):
            frame = av.VideoFrame.from_ndarray(_picture(kind, number, index), format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _picture(kind: Kind, number: int, index: int) -> np.ndarray:
    rng = np.random.default_rng(number * 1000 + index)
    y, x = np.mgrid[: kind.height, : kind.width].astype(np.float32)
    a, b = index / 7 + number, index / 11 - number
    planes = [np.sin(x / 17 + a) + np.cos(y / 23 - b), np.sin((x + y) / 31 + b), np.cos(x / 41 - y / 13 + a)]
    noise = rng.integers(-9, 10, (kind.height, kind.width, 1))
    return np.clip(127 + 60 * np.stack(planes, axis=-1) + noise, 0, 255).astype(np.uint8)


def to_litdata(kind: AnyKind, folder: Path) -> None:
    """Write the files' bytes into litdata's chunks."""
    from headrace.bench.peers.peer_loaders import write_litdata

    paths = sorted(str(path) for path in (folder / "clips").iterdir())
    with whole(folder / "litdata") as made:
        write_litdata(_read, paths, made, f"{kind.shard_bytes >> 20}MB")


def _read(path: str) -> dict[str, Any]:
    return {"file": Path(path).read_bytes()}


@functools.cache
def ffmpeg_libraries(folder: Path) -> Path:
    """A folder where torchcodec and SPDL find the FFmpeg that came with PyAV: the same build for all candidates."""
    import av

    target = folder / "ffmpeg"
    target.mkdir(exist_ok=True)
    for library in (Path(av.__file__).parents[1] / "av.libs").iterdir():
        plain = re.sub(r"-[0-9a-f]{8}(?=\.so)", "", library.name)
        plain = re.sub(r"(\.so\.\d+)[.\d]*$", r"\1", plain)
        for name in (library.name, plain):
            if not (target / name).exists():
                (target / name).symlink_to(library)
    return target


TUNE_RATE, TUNE_PACKET = 48_000, 1024
TUNE_SECONDS = 32
"""The length of the tune that is encoded and then repeated: a whole number of packets."""


def join_clips(target: Path, clips: Sequence[Path], seconds: int, tune: Path) -> None:
    """Join `clips`, of `seconds` each, in this order, into an MP4 with its index at the beginning."""
    import av

    with av.open(str(target), "w", options={"movflags": "faststart"}) as made, av.open(str(tune)) as sung:
        with av.open(str(clips[0])) as first:
            pictures: Any = made.add_stream_from_template(first.streams.video[0])
        sound: Any = made.add_stream_from_template(sung.streams.audio[0])
        notes = [bytes(packet) for packet in sung.demux(audio=0) if packet.size][
            : TUNE_SECONDS * TUNE_RATE // TUNE_PACKET
        ]
        sent = 0
        for number, path in enumerate(clips):
            for packet in _shifted_packets(path, number * seconds):
                packet.stream = pictures
                made.mux(packet)
            until = (number + 1) * seconds * TUNE_RATE // TUNE_PACKET
            for place in range(sent, until):
                note: Any = av.Packet(notes[place % len(notes)])
                note.stream, note.time_base = sound, Fraction(1, TUNE_RATE)
                note.pts = note.dts = place * TUNE_PACKET
                note.duration, note.is_keyframe = TUNE_PACKET, True
                made.mux(note)
            sent = until


def _shifted_packets(path: Path, seconds: int) -> Iterator[Any]:
    import av

    with av.open(str(path)) as clip:
        for packet in clip.demux(video=0):
            if packet.size and packet.pts is not None and packet.dts is not None:
                later = round(seconds / packet.time_base)
                packet.pts += later
                packet.dts += later
                yield packet


def encode_tune(target: Path) -> None:
    """Encode a tune as AAC."""
    import av

    with av.open(str(target), "w") as made:
        stream: Any = made.add_stream("aac", rate=TUNE_RATE, layout="mono")
        stream.bit_rate = 64_000
        for place in range(TUNE_SECONDS * TUNE_RATE // TUNE_PACKET + 2):
            at = (place * TUNE_PACKET + np.arange(TUNE_PACKET)) / TUNE_RATE
            wave = np.sin(2 * np.pi * at * (220 + 110 * (place // 24 % 5))) * 0.2
            frame = av.AudioFrame.from_ndarray(wave.astype(np.float32)[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = TUNE_RATE, place * TUNE_PACKET
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))
