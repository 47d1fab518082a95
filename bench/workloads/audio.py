"""Audio for the loader benchmarks: short recordings, as in datasets of speech and sound events, and long ones.

The sound is synthetic: a voice that changes its pitch, vowels and loudness, with noise and pauses. Short recordings are
16-bit FLAC, alternately at 16 and 44.1 kHz. Long ones are FLAC at 16 kHz, Opus in Ogg, MP3 and AAC in M4A, in turn. One
minute is made for each format and repeated: as samples for FLAC, whose frames are numbered, otherwise as packets.
Invariant: a recording is a pure function of its number and kind. Failure behaviour: PyAV's exceptions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

RATE = 16_000
"""The rate of all delivered windows, in one channel."""
BATCH = 32
DISTINCT = 48
"""The number of short recordings that are encoded. A dataset repeats them under other names."""
_HOP, _FFT = 160, 400


@dataclass(frozen=True)
class Form:
    """A file format: the suffix, the codec and its options."""

    ext: str
    codec: str
    rate: int
    layout: str = "mono"
    bit_rate: int = 0
    options: tuple[tuple[str, str], ...] = ()


FLAC, FINE_FLAC = Form("flac", "flac", RATE), Form("flac", "flac", 44_100)
LONG = (
    FLAC,
    Form("ogg", "libopus", 48_000, bit_rate=32_000),
    Form("mp3", "libmp3lame", 44_100, bit_rate=64_000, options=(("reservoir", "0"),)),  # independent packets
    Form("m4a", "aac", 44_100, "stereo", 96_000),
)


@dataclass(frozen=True)
class Sound:
    """Recordings from `shortest` to `longest` seconds.

    A candidate delivers windows of `window` seconds or, with `bands`, their log-mel spectrograms. An epoch has
    `per_file` windows of each file. `per_file` divides `BATCH`.
    """

    name: str
    shortest: int
    longest: int
    window: int
    forms: tuple[Form, ...]
    per_file: int = 1
    bands: int = 0
    of: str = ""
    """The kind whose files are used, if it is another kind."""
    shard_bytes: int = 64 << 20
    stretch: int = 60
    """Seconds of a long recording that are synthesized, and then repeated."""

    @property
    def folder(self) -> str:
        return self.of or self.name

    @property
    def sought(self) -> bool:
        """Whether files are so long that a reader seeks in them."""
        return self.per_file > 1

    @property
    def batch(self) -> int:
        """Files of a batch, for a loader that decodes all windows of a file together."""
        return BATCH // self.per_file

    @property
    def buffer(self) -> int:
        """Size of a shuffle buffer, in files. Long recordings are too large for one."""
        return 1 if self.sought else 256

    @property
    def default(self) -> int:
        """Windows of an epoch by default."""
        return 76 * self.per_file if self.sought else 2_400

    @property
    def shape(self) -> tuple[int, ...]:
        samples = self.window * RATE
        return (1, self.bands, 1 + samples // _HOP) if self.bands else (1, samples)

    @property
    def dtype(self) -> str:
        return "float32"

    def seconds(self, number: int) -> int:
        """Length of recording `number` in seconds."""
        return self.shortest + 7919 * (number % DISTINCT) % (self.longest - self.shortest + 1)

    def described(self, files: int) -> str:
        """One line that describes an epoch."""
        what = f"log-mel {self.bands} of windows" if self.bands else "windows"
        forms = ", ".join(f"{form.ext} {form.rate / 1000:g} kHz" for form in self.forms)
        recordings = f"{files} recordings of {self.shortest} to {self.longest} s ({forms})"
        return f"{files * self.per_file} {what} of {self.window} s of {recordings}, at {RATE // 1000} kHz, mono"


_SOUND = Sound("sound", 10, 16, 5, (FLAC, FINE_FLAC))
KINDS = {
    kind.name: kind
    for kind in (
        _SOUND,
        replace(_SOUND, name="mels", bands=80, of="sound"),
        Sound("recordings", 2400, 3600, 10, LONG, per_file=8, shard_bytes=128 << 20),
    )
}


def write(kind: Sound, folder: Path, count: int, tell: Callable[..., None]) -> None:
    """Write `count` recordings. Of short recordings only the first `DISTINCT` are encoded."""
    paths = list[Path]()
    for number in range(count):
        form = kind.forms[number % len(kind.forms)]
        paths.append(folder / f"{number:05}.{form.ext}")
        if number >= DISTINCT and not kind.sought:
            os.link(paths[number % DISTINCT], paths[number])
            continue
        tell(f"making recordings ({kind.name})", number / min(count, count if kind.sought else DISTINCT))
        if kind.sought and form.codec != "flac":
            _repeated(paths[number], form, kind, number)
        else:
            _encoded(paths[number], form, _samples(form, kind, number, kind.seconds(number)))


def _samples(form: Form, kind: Sound, number: int, seconds: int) -> Iterator[npt.NDArray[np.int16]]:
    """Yield the samples of each second."""
    voice = _voice(form.rate, kind.stretch, 0) if kind.sought else _voice(form.rate, seconds, number)
    for second in range(seconds):
        at = (second + number if kind.sought else second) * form.rate % len(voice)
        yield voice[at : at + form.rate]


def _encoded(target: Path, form: Form, seconds: Iterator[npt.NDArray[np.int16]]) -> None:
    import av

    with av.open(str(target), "w") as made:
        stream: Any = made.add_stream(form.codec, rate=form.rate, layout=form.layout, options=dict(form.options))
        if form.bit_rate:
            stream.bit_rate = form.bit_rate
        for number, second in enumerate(seconds):
            channels = 2 if form.layout == "stereo" else 1
            packed = np.repeat(second, channels)[None]
            frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=form.layout)
            frame.sample_rate, frame.pts, frame.time_base = form.rate, number * form.rate, Fraction(1, form.rate)
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))


def _repeated(target: Path, form: Form, kind: Sound, number: int) -> None:
    """Write a file that repeats the packets of the synthesized stretch."""
    import av

    stretch = target.with_name(f".stretch.{form.ext}")
    _encoded(stretch, form, _samples(form, kind, 0, kind.stretch))
    with av.open(str(stretch)) as sung, av.open(str(target), "w") as made:
        stream: Any = made.add_stream_from_template(sung.streams.audio[0])
        packets = [packet for packet in sung.demux(audio=0) if packet.size][2:-2]
        step = sorted(int(packet.duration or 0) for packet in packets)[len(packets) // 2]
        base = packets[0].time_base
        for place in range(int(kind.seconds(number) / (step * base))):
            packet: Any = av.Packet(bytes(packets[(place + 50 * number) % len(packets)]))
            packet.stream, packet.time_base = stream, base
            packet.pts = packet.dts = place * step
            packet.duration, packet.is_keyframe = step, True
            made.mux(packet)
    stretch.unlink()


@functools.lru_cache(maxsize=4)
def _voice(rate: int, seconds: int, number: int) -> npt.NDArray[np.int16]:
    """Synthesize harmonics with changing formants, in syllables, over noise."""
    rng, count = np.random.default_rng(number), rate * seconds

    def wander(low: float, high: float, a_second: float) -> npt.NDArray[np.float32]:
        knots = rng.uniform(low, high, max(2, int(seconds * a_second) + 2))
        return np.interp(np.linspace(0, len(knots) - 1, count), np.arange(len(knots)), knots).astype(np.float32)

    pitch = wander(90, 220, 2)
    phase = np.cumsum(pitch / rate, dtype=np.float64)
    phase = (2 * np.pi * (phase - np.floor(phase))).astype(np.float32)
    first, second = wander(300, 800, 4), wander(900, 2400, 4)
    voice = np.zeros(count, np.float32)
    for harmonic in range(1, 17):
        high = harmonic * pitch
        loud = np.exp(-(((high - first) / 200) ** 2)) + 0.5 * np.exp(-(((high - second) / 300) ** 2)) + 0.3 / harmonic
        voice += loud * np.sin(harmonic * phase)
    loudness = np.clip(wander(-0.5, 1, 6), 0, 1)
    breath = rng.standard_normal(count, np.float32) * (0.004 + 0.1 * np.clip(wander(-1, 0.3, 5), 0, 1))
    sound = 0.25 * voice * loudness + breath
    made: npt.NDArray[np.int16] = (np.clip(sound, -1, 1) * 32_000).astype(np.int16)
    return made
