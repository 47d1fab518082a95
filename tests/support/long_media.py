"""Long files, made here: films of noise in several containers, and recordings."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame

FRAMES, GROUP, RATE = 900, 12, 48_000
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
            frame_of_audio = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame_of_audio.sample_rate, frame_of_audio.pts = RATE, number * (RATE // 25)
            output.mux(sound.encode(frame_of_audio))
        output.mux(video.encode(None))
        output.mux(sound.encode(None))
    return target.getvalue()


def copied(data: bytes, name: str, options: dict[str, str], folder: Path, *, silent: bool = False) -> None:
    """The same packets in another container, or those of the pictures."""
    with av.open(io.BytesIO(data), "r") as source, av.open(str(folder / name), "w", options=options) as output:
        streams = {
            stream.index: output.add_stream_from_template(stream)
            for stream in list(source.streams)[: 1 if silent else 2]
        }
        for packet in source.demux():
            if packet.size and packet.stream.index in streams:
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
