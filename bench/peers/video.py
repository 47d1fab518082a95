"""Video for the loader benchmark: the files, and the candidates that decode clips of them.

The files are short clips, long clips with few key frames, or long videos with sound. A long video is a sequence of
encoded clips, copied and not encoded again, with a tune in AAC. Each clip begins with a key frame and lasts a whole
number of frames, so the frame rate is constant where clips are joined.

A peer decodes as its documentation shows, with PyAV, torchcodec or SPDL. It gets the bytes of a file, a path or a file
object. SPDL gets a URL in place of a file object. The upper bound ("floor") is our decoder alone: the same clips, read
from files and decoded by as many threads, without batches, plan or digests.

Invariants:

* A file depends only on its number.
* Each candidate delivers uint8 (clips of a file, 16, 3, size, size): every second frame from random starts, resized to
  cover the size and cropped around the centre. It decodes with one thread. `PLANES` delivers the same clips as yuv420p.
* Peers read all clips of a file from one open file, in order of time. Headrace mixes the clips of different files in a
  batch.

Failure behaviour: an exception of a library ends the candidate's process.
"""

from __future__ import annotations

import functools
import importlib
import io
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.core.data import write_video
from headrace.bench.core.measure import Progress
from headrace.bench.peers import loaders
from headrace.bench.peers.loaders import THREADS, decoding, peers_with, peers_with_own_python
from headrace.bench.peers.source import FLOOR, OURS, Peer, Source, repeat_files

PLANES = f"{OURS}, planes"
FAST, FAST_FLOOR = f"{OURS}, color='fast'", f"{FLOOR}, color='fast'"
FPS = 25
FRAMES, STRIDE = 16, 2
DISTINCT = 12
"""The number of clips that are encoded.

A dataset repeats them under other names. A long video joins them in random order.
"""
BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Videos:
    """H.264 files of `seconds`, with a key frame every `gop` frames. A candidate delivers clips of `size` x `size`.

    A long video has `parts` of such files one after the other, with sound. An epoch has `per_file` clips of each file.
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
    def long_files(self) -> bool:
        """Whether files are long, so that readers seek in them."""
        return self.parts > 1

    @property
    def default(self) -> int:
        """The default number of clips of an epoch."""
        return 608 if self.long_files else 600

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a clip that a candidate delivers."""
        return FRAMES, 3, self.size, self.size

    @property
    def dtype(self) -> str:
        return "uint8"

    def described(self, files: int) -> str:
        """Return one line that describes an epoch."""
        clips = f"{self.length} s, {self.width}x{self.height}, a key frame every {self.gop}"
        clips = f"clips of {files} films of {clips}" if self.long_files else f"clips of {clips}"
        return f"{files * self.per_file} H.264 {clips}; {FRAMES} frames, every {STRIDE}nd, to {self.size}²"

    @property
    def batch(self) -> int:
        """Files of a batch, for a loader that decodes all clips of a file together."""
        return BATCH // self.per_file

    @property
    def buffer(self) -> int:
        """Size of a shuffle buffer, in files. Long videos are too large for a shuffle buffer."""
        return 1 if self.long_files else 64

    def write(self, folder: Path, count: int, progress: Progress) -> None:
        """Write `count` files: clips, or long videos of the same clips, each in another order."""
        if self.long_files:
            _long_videos(self, folder, count, progress)
        else:
            _clips(self, folder, count, progress)

    def ours(self) -> dict[str, Peer]:
        """Headrace and the upper bound ("floor"), with exact and with fast colour conversion, and raw planes."""
        return {
            OURS: Peer(_headrace),
            FAST: Peer(functools.partial(_headrace, color="fast")),
            PLANES: Peer(_headrace_planes, shape=(FRAMES, self.size * 3 // 2, self.size)),
            FLOOR: Peer(_decoder_only),
            FAST_FLOOR: Peer(functools.partial(_decoder_only, color="fast")),
        }

    def peers(self) -> dict[str, Peer]:
        """The other candidates."""
        return {
            **peers_with("PyAV", pyav),
            "webdataset + torchcodec, 2 workers": Peer(
                decoding(torchcodec, loaders.webdataset, 2), ("webdataset", "torchcodec")
            ),
            "SPDL, 2 threads": Peer(decoding(_spdl_named, loaders.spdl), ("spdl",)),
            "torchcodec, 2 threads": Peer(decoding(torchcodec, loaders.threads), ("torchcodec",)),
            **peers_with_own_python("PyAV", pyav),
        }


KINDS = (
    Videos(name="short", seconds=4, width=320, height=240, gop=12, size=112),
    Videos(name="long", seconds=10, width=640, height=360, gop=60, size=224),
    Videos(
        name="films",
        seconds=10,
        width=640,
        height=360,
        gop=60,
        size=224,
        parts=60,
        per_file=8,
        shard_bytes=128 << 20,
    ),
)


# --- the files


def _clips(kind: Videos, folder: Path, count: int, progress: Progress) -> None:
    def write(path: Path, number: int) -> None:
        progress(f"making {kind.name} clips", number / DISTINCT)
        encode(path, kind, number)

    repeat_files(folder, "mp4", count, DISTINCT, write)


def _long_videos(kind: Videos, folder: Path, count: int, progress: Progress) -> None:
    """Write long videos, each of the same clips in another order."""
    parts = folder / "parts"
    parts.mkdir()
    _clips(kind, parts, DISTINCT, progress)
    clips = sorted(parts.iterdir())
    _encode_tune(tune := parts / "tune.mp4")
    for number in range(count):
        progress("joining them to long videos", number / count)
        order = np.random.default_rng(number).integers(0, len(clips), kind.parts)
        _join_clips(folder / f"{number:05}.mp4", [clips[one] for one in order], kind.seconds, tune)
    shutil.rmtree(parts)


def encode(path: Path, kind: Videos, number: int) -> None:
    """Encode one clip: two patterns that move against each other, and a little noise."""
    options = {"g": str(kind.gop), "keyint_min": str(kind.gop), "threads": "1", "sc_threshold": "0"}
    pictures = (_picture(kind, number, index) for index in range(kind.seconds * FPS))
    write_video(path, "libx264", pictures, options=options | {"preset": "veryfast"})


def _picture(kind: Videos, number: int, index: int) -> np.ndarray:
    rng = np.random.default_rng(number * 1000 + index)
    y, x = np.mgrid[: kind.height, : kind.width].astype(np.float32)
    a, b = index / 7 + number, index / 11 - number
    planes = [np.sin(x / 17 + a) + np.cos(y / 23 - b), np.sin((x + y) / 31 + b), np.cos(x / 41 - y / 13 + a)]
    noise = rng.integers(-9, 10, (kind.height, kind.width, 1))
    return np.clip(127 + 60 * np.stack(planes, axis=-1) + noise, 0, 255).astype(np.uint8)


TUNE_RATE, TUNE_PACKET = 48_000, 1024
TUNE_SECONDS = 32
"""The length of the tune that is encoded and then repeated: a whole number of packets."""


def _join_clips(target: Path, clips: Sequence[Path], seconds: int, tune: Path) -> None:
    """Join `clips`, of `seconds` each, in this order, into an MP4 with its index at the beginning."""
    import av

    with av.open(str(target), "w", options={"movflags": "faststart"}) as joined, av.open(str(tune)) as music:
        with av.open(str(clips[0])) as first:
            pictures: Any = joined.add_stream_from_template(first.streams.video[0])
        sound: Any = joined.add_stream_from_template(music.streams.audio[0])
        notes = [bytes(packet) for packet in music.demux(audio=0) if packet.size][
            : TUNE_SECONDS * TUNE_RATE // TUNE_PACKET
        ]
        sent = 0
        for number, path in enumerate(clips):
            for packet in _shifted_packets(path, number * seconds):
                packet.stream = pictures
                joined.mux(packet)
            until = (number + 1) * seconds * TUNE_RATE // TUNE_PACKET
            for place in range(sent, until):
                note: Any = av.Packet(notes[place % len(notes)])
                note.stream, note.time_base = sound, Fraction(1, TUNE_RATE)
                note.pts = note.dts = place * TUNE_PACKET
                note.duration, note.is_keyframe = TUNE_PACKET, True
                joined.mux(note)
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


def _encode_tune(target: Path) -> None:
    """Encode a tune as AAC."""
    import av

    with av.open(str(target), "w") as file:
        stream: Any = file.add_stream("aac", rate=TUNE_RATE, layout="mono")
        stream.bit_rate = 64_000
        for place in range(TUNE_SECONDS * TUNE_RATE // TUNE_PACKET + 2):
            at = (place * TUNE_PACKET + np.arange(TUNE_PACKET)) / TUNE_RATE
            wave = np.sin(2 * np.pi * at * (220 + 110 * (place // 24 % 5))) * 0.2
            frame = av.AudioFrame.from_ndarray(wave.astype(np.float32)[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = TUNE_RATE, place * TUNE_PACKET
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


# --- the candidates


def pyav(source: Any, kind: Videos) -> torch.Tensor:
    """Seek before a random start, decode from there, and take every second frame."""
    import av

    with av.open(io.BytesIO(source) if isinstance(source, bytes) else source, "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        seconds = float(container.duration or 0) / 1e6
        starts = _random_starts(seconds - FRAMES * STRIDE / float(stream.average_rate or FPS), kind)
        return torch.stack([_pyav(container, stream, start, kind.size) for start in starts])


def _pyav(container: Any, stream: Any, start: float, size: int) -> torch.Tensor:
    container.seek(int(start * 1e6))
    pictures: list[torch.Tensor] = []
    index = 0
    for frame in container.decode(stream):
        if frame.time is None or frame.time < start - 1e-3:
            continue
        if index % STRIDE == 0:
            pictures.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
        index += 1
        if len(pictures) == FRAMES:
            break
    pictures += [pictures[-1]] * (FRAMES - len(pictures))
    return _fit(torch.stack(pictures).permute(0, 3, 1, 2), size)


def torchcodec(source: Any, kind: Videos) -> torch.Tensor:
    """Decode by frame numbers, as the documentation shows. Approximate seeking trusts the header and avoids a scan."""
    decoders: Any = importlib.import_module("torchcodec.decoders")
    decoder = decoders.VideoDecoder(source, num_ffmpeg_threads=1, seek_mode="approximate")
    room = (decoder.metadata.num_frames or 0) - (FRAMES - 1) * STRIDE - 1
    clips = list[torch.Tensor]()
    for start in sorted(random.randint(0, max(0, room)) for _ in range(kind.per_file)):
        clips.append(_fit(decoder.get_frames_in_range(start, start + FRAMES * STRIDE - 1, STRIDE).data, kind.size))
    return torch.stack(clips)


def spdl(source: bytes | str, kind: Videos) -> torch.Tensor:
    """Demultiplex the window, then trim, scale and crop in FFmpeg's filter graph, as SPDL does.

    SPDL gets the length of the file. The other peers find it out.
    """
    io_: Any = importlib.import_module("spdl.io")
    with io_.Demuxer(source) as demuxer:
        starts = _random_starts(kind.length - FRAMES * STRIDE / FPS, kind)
        return torch.stack([_spdl(io_, demuxer, start, kind.size) for start in starts])


def _spdl(io_: Any, demuxer: Any, start: float, size: int) -> torch.Tensor:
    # Whole microseconds: below a thousandth, the exact fraction of a float needs a denominator of more than 64 bits.
    begin = Fraction(round(start * 1e6), 1_000_000)
    end = begin + Fraction(FRAMES * STRIDE, FPS)
    chain = (
        f"trim=start={float(begin):.6f}:end={float(end):.6f},select='not(mod(n,{STRIDE}))',"
        f"scale={size}:{size}:force_original_aspect_ratio=increase,crop={size}:{size},format=rgb24"
    )
    packets = demuxer.demux_video((begin, end))
    config = io_.decode_config(decoder_options={"threads": "1"})
    frames: Any = io_.decode_packets(packets, filter_desc=chain, decode_config=config)
    clip = io_.to_torch(io_.convert_frames(frames)).permute(0, 3, 1, 2)[:FRAMES]
    return torch.cat([clip, clip[-1:].expand(FRAMES - len(clip), -1, -1, -1)]).contiguous()


def _random_starts(room: float, kind: Videos) -> Sequence[float]:
    return sorted(random.uniform(0, max(0.0, room)) for _ in range(kind.per_file))


def _fit(video: torch.Tensor, size: int) -> torch.Tensor:
    height, width = video.shape[-2:]
    scale = size / min(height, width)
    shape = (max(size, round(height * scale)), max(size, round(width * scale)))
    video = torch.nn.functional.interpolate(video, shape, mode="bilinear", antialias=True)
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    return video[..., top : top + size, left : left + size].contiguous()


def _spdl_named(named: tuple[str, bytes | str], kind: Videos) -> torch.Tensor:
    return spdl(named[1], kind)


def _headrace(source: Source, kind: Videos, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip

    return load(source, Clip(FRAMES, STRIDE, per_video=kind.per_file), kind.size, BATCH, color)


def load(source: Source, clip: Any, size: int, batch_size: int, color: Any = "bt601") -> Iterator[torch.Tensor]:
    """Yield the batches of a `VideoLoader`: uint8 (B, T, 3, size, size)."""
    from headrace.loaders import VideoLoader

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS, "color": color}
    with VideoLoader(source.url("dataset"), batch_size, clip=clip, size=(size, size), **options) as loader:
        for batch in loader:
            yield batch["video"]


def _headrace_planes(source: Source, kind: Videos) -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip, Loader, Video

    video = Video(Clip(FRAMES, STRIDE, per_video=kind.per_file), (kind.size, kind.size), pixel_format="yuv420p")
    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS}
    with Loader(source.url("dataset"), BATCH, fields={"video": video}, **options) as loader:
        for batch in loader:
            yield batch["video"]


def _decoder_only(source: Source, kind: Videos, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip

    return decode_only(source, kind, Clip(FRAMES, STRIDE, per_video=kind.per_file), kind.size, color)


def decode_only(source: Source, kind: Any, clip: Any, size: int, color: Any = "bt601") -> Iterator[torch.Tensor]:
    """The upper bound ("floor"): Headrace's decoder without the loader.

    Yields the clips of a file: uint8 (clips, T, 3, size, size).
    """
    from headrace.dataio.shards.sample import Sample
    from headrace.loaders.clip import choose
    from headrace.loaders.decode.base import Decoded, Fit, Request
    from headrace.loaders.decode.pyav import PyAVDecoder

    decoder, fit = PyAVDecoder(), Fit((size, size))

    def decode_sample(sample: Sample, data: memoryview) -> torch.Tensor:
        assert sample.video is not None
        clips = [choose(sample.video, clip, 0, 0, sample.id, number) for number in range(kind.per_file)]
        results = decoder.decode([Request(data, sample.video, frames, color, fit) for frames in clips])
        assert all(isinstance(decoded, Decoded) for decoded in results), results
        return torch.stack([decoded.frames for decoded in results if isinstance(decoded, Decoded)])

    return loaders.decoder_only(decode_sample, source, kind)
