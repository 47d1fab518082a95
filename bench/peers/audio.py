"""Audio for the loader benchmark: short and long recordings, and the candidates that decode windows of them.

The sound is synthetic: a voice that changes its pitch, vowels and loudness, with noise and pauses. Short recordings are
16-bit FLAC, alternately at 16 and 44.1 kHz. Long ones are FLAC at 16 kHz, Opus in Ogg, MP3 and AAC in M4A, in turn. One
minute is synthesized for each format and repeated. FLAC repeats the samples, because its frames are numbered. The other
formats repeat the packets.

A peer uses soundfile, torchcodec, PyAV or SPDL. It gets the bytes of a file, a path or a file object. SPDL gets a URL
in place of a file object. The upper bound ("floor") is our decoder alone: the same windows, read from files, decoded
and resampled by as many threads, without batches, plan or digests.

Invariants:

* A recording depends only on its number and kind.
* Each candidate delivers float32 (windows of a file, 1, samples) at 16 kHz from random starts, or their log-mel
  spectrograms (windows, 1, mels, columns). Both are padded with zeros at the end.
* Peers read all windows of a file from one open file, in order of time. Headrace mixes the windows of different files
  in a batch.

Failure behaviour: an exception of a library ends the candidate's process.
"""

from __future__ import annotations

import functools
import importlib
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.bench.core.measure import Progress
from headrace.bench.peers import loaders
from headrace.bench.peers.loaders import THREADS, decoding, peers_with, peers_with_own_python
from headrace.bench.peers.source import FLOOR, OURS, Peer, Source

RATE = 16_000
"""The sample rate of all delivered windows, in Hz. They have one channel."""
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
    Form("m4a", "aac", 44_100, layout="stereo", bit_rate=96_000),
)


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Recordings from `shortest` to `longest` seconds.

    A candidate delivers windows of `window` seconds or, with `n_mels`, their log-mel spectrograms. An epoch has
    `per_file` windows of each file. `per_file` divides `BATCH`.
    """

    name: str
    shortest: int
    longest: int
    window: int
    forms: tuple[Form, ...]
    per_file: int = 1
    n_mels: int = 0
    of: str = ""
    """Another kind, if this one uses its files."""
    shard_bytes: int = 64 << 20
    stretch: int = 60
    """Seconds of a long recording that are synthesized, and then repeated."""

    @property
    def folder(self) -> str:
        return self.of or self.name

    @property
    def long_files(self) -> bool:
        """Whether files are long, so that readers seek in them."""
        return self.per_file > 1

    @property
    def batch(self) -> int:
        """Files of a batch, for a loader that decodes all windows of a file together."""
        return BATCH // self.per_file

    @property
    def buffer(self) -> int:
        """Size of a shuffle buffer, in files. Long recordings are too large for a shuffle buffer."""
        return 1 if self.long_files else 256

    @property
    def default(self) -> int:
        """The default number of windows of an epoch."""
        return 76 * self.per_file if self.long_files else 2_400

    @property
    def shape(self) -> tuple[int, ...]:
        samples = self.window * RATE
        return (1, self.n_mels, 1 + samples // _HOP) if self.n_mels else (1, samples)

    @property
    def dtype(self) -> str:
        return "float32"

    def seconds(self, number: int) -> int:
        """Length of recording `number` in seconds."""
        return self.shortest + 7919 * (number % DISTINCT) % (self.longest - self.shortest + 1)

    def described(self, files: int) -> str:
        """Return one line that describes an epoch."""
        output = f"log-mel {self.n_mels} of windows" if self.n_mels else "windows"
        forms = ", ".join(f"{form.ext} {form.rate / 1000:g} kHz" for form in self.forms)
        recordings = f"{files} recordings of {self.shortest} to {self.longest} s ({forms})"
        return f"{files * self.per_file} {output} of {self.window} s of {recordings}, at {RATE // 1000} kHz, mono"

    def write(self, folder: Path, count: int, progress: Progress) -> None:
        """Write `count` recordings. Of short recordings only the first `DISTINCT` are encoded."""
        encoded = count if self.long_files else min(count, DISTINCT)
        paths = [folder / f"{number:05}.{self.forms[number % len(self.forms)].ext}" for number in range(count)]
        for number, path in enumerate(paths):
            form = self.forms[number % len(self.forms)]
            if number >= encoded:
                path.hardlink_to(paths[number % DISTINCT])
                continue
            progress(f"making recordings ({self.name})", number / encoded)
            if self.long_files and form.codec != "flac":
                _write_repeated(path, form, self, number)
            else:
                _encoded(path, form, _samples(form, self, number, self.seconds(number)))

    def ours(self) -> dict[str, Peer]:
        """Headrace and the upper bound ("floor")."""
        return {OURS: Peer(_headrace), FLOOR: Peer(_decoder_only)}

    def peers(self) -> dict[str, Peer]:
        """The other candidates. PyAV decodes long recordings, because soundfile reads no M4A."""
        name, decode, package = ("PyAV", pyav, ()) if self.long_files else ("soundfile", soundfile, ("soundfile",))
        return {
            **peers_with(name, decode, *package),
            f"{name}, 2 threads": Peer(decoding(decode, loaders.threads), package),
            "webdataset + torchcodec, 2 workers": Peer(
                decoding(torchcodec, loaders.webdataset, 2), ("webdataset", "torchcodec")
            ),
            "torchcodec, 2 threads": Peer(decoding(torchcodec, loaders.threads), ("torchcodec",)),
            "SPDL, 2 threads": Peer(decoding(_spdl_named, loaders.spdl), ("spdl",)),
            **peers_with_own_python("PyAV", pyav),
        }


_SOUND = Recordings(name="sound", shortest=10, longest=16, window=5, forms=(FLAC, FINE_FLAC))
KINDS = (
    _SOUND,
    replace(_SOUND, name="mels", n_mels=80, of="sound"),
    Recordings(
        name="recordings", shortest=2400, longest=3600, window=10, forms=LONG, per_file=8, shard_bytes=128 << 20
    ),
)


# --- the files


def _samples(form: Form, kind: Recordings, number: int, seconds: int) -> Iterator[npt.NDArray[np.int16]]:
    """Yield the samples of each second."""
    voice = (
        _synthesize_voice(form.rate, kind.stretch, 0)
        if kind.long_files
        else _synthesize_voice(form.rate, seconds, number)
    )
    for second in range(seconds):
        at = (second + number if kind.long_files else second) * form.rate % len(voice)
        yield voice[at : at + form.rate]


def _encoded(target: Path, form: Form, seconds: Iterator[npt.NDArray[np.int16]]) -> None:
    import av

    with av.open(str(target), "w") as file:
        stream: Any = file.add_stream(form.codec, rate=form.rate, layout=form.layout, options=dict(form.options))
        if form.bit_rate:
            stream.bit_rate = form.bit_rate
        for number, second in enumerate(seconds):
            channels = 2 if form.layout == "stereo" else 1
            packed = np.repeat(second, channels)[None]
            frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=form.layout)
            frame.sample_rate, frame.pts, frame.time_base = form.rate, number * form.rate, Fraction(1, form.rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def _write_repeated(target: Path, form: Form, kind: Recordings, number: int) -> None:
    """Write a file that repeats the packets of the synthesized stretch."""
    import av

    stretch = target.with_name(f".stretch.{form.ext}")
    _encoded(stretch, form, _samples(form, kind, 0, kind.stretch))
    with av.open(str(stretch)) as music, av.open(str(target), "w") as file:
        stream: Any = file.add_stream_from_template(music.streams.audio[0])
        packets = [packet for packet in music.demux(audio=0) if packet.size][2:-2]
        step = sorted(int(packet.duration or 0) for packet in packets)[len(packets) // 2]
        base = packets[0].time_base
        for place in range(int(kind.seconds(number) / (step * base))):
            packet: Any = av.Packet(bytes(packets[(place + 50 * number) % len(packets)]))
            packet.stream, packet.time_base = stream, base
            packet.pts = packet.dts = place * step
            packet.duration, packet.is_keyframe = step, True
            file.mux(packet)
    stretch.unlink()


@functools.lru_cache(maxsize=4)
def _synthesize_voice(rate: int, seconds: int, number: int) -> npt.NDArray[np.int16]:
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
    samples: npt.NDArray[np.int16] = (np.clip(sound, -1, 1) * 32_000).astype(np.int16)
    return samples


# --- the candidates


def soundfile(source: Any, kind: Recordings) -> torch.Tensor:
    """Seek to a random start and read. soxr resamples other rates, as in librosa. soundfile reads no M4A."""
    soundfile: Any = importlib.import_module("soundfile")
    windows = list[torch.Tensor]()
    with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
        for start in _random_starts(len(file) / file.samplerate, kind):
            file.seek(int(start * file.samplerate))
            samples = file.read(kind.window * file.samplerate, dtype="float32", always_2d=True).mean(axis=1)
            if file.samplerate != RATE:
                samples = importlib.import_module("soxr").resample(samples, file.samplerate, RATE)
            windows.append(torch.from_numpy(samples)[None])
    return _finished(windows, kind)


def torchcodec(source: Any, kind: Recordings) -> torch.Tensor:
    """Decode ranges of seconds, as the documentation shows. torchcodec resamples and downmixes while it decodes."""
    decoder = importlib.import_module("torchcodec.decoders").AudioDecoder(source, sample_rate=RATE, num_channels=1)
    seconds = decoder.metadata.duration_seconds_from_header or 0.0
    starts = _random_starts(seconds, kind)
    return _finished([decoder.get_samples_played_in_range(at, at + kind.window).data for at in starts], kind)


def pyav(source: Any, kind: Recordings) -> torch.Tensor:
    """Seek before a random start, decode from there, and resample each frame."""
    import av

    with av.open(io.BytesIO(source) if isinstance(source, bytes) else source, "r") as container:
        stream = container.streams.audio[0]
        starts = _random_starts(float(container.duration or 0) / 1e6, kind)
        return _finished([_pyav(container, stream, start, kind.window) for start in starts], kind)


def _pyav(container: Any, stream: Any, start: float, seconds: int) -> torch.Tensor:
    import av

    resampler = av.AudioResampler(format="fltp", layout="mono", rate=RATE)
    container.seek(int(start * 1e6))
    parts, first, decoded_samples = list[torch.Tensor](), 0, 0
    for frame in container.decode(stream):
        if frame.time + frame.samples / frame.sample_rate <= start:
            continue
        if not parts:
            first = max(0, round((start - frame.time) * RATE))
        parts += [torch.from_numpy(part.to_ndarray()) for part in resampler.resample(frame)]
        decoded_samples += parts[-1].shape[1] if parts else 0
        if decoded_samples >= first + seconds * RATE:
            break
    return torch.cat(parts, 1)[:, first:] if parts else torch.zeros(1, 0)


def spdl(source: bytes | str, kind: Recordings, seconds: int) -> torch.Tensor:
    """Demultiplex the window, then trim, resample and downmix in FFmpeg's filter graph, as SPDL does.

    SPDL gets the length of the file. The other peers find it out.
    """
    io_: Any = importlib.import_module("spdl.io")
    windows = list[torch.Tensor]()
    with io_.Demuxer(source) as demuxer:
        for start in _random_starts(seconds, kind):
            # Whole microseconds: the exact fraction of a float may need a denominator of more than 64 bits.
            begin = Fraction(round(start * 1e6), 1_000_000)
            packets = _packets(io_, demuxer, source, (begin, begin + kind.window))
            span = float(begin), float(begin + kind.window)
            chain = io_.get_audio_filter_desc(sample_rate=RATE, num_channels=1, sample_fmt="fltp", timestamp=span)
            windows.append(io_.to_torch(io_.convert_frames(io_.decode_packets(packets, filter_desc=chain))))
    return _finished(windows, kind)


def _packets(io_: Any, demuxer: Any, source: Any, span: tuple[Fraction, Fraction]) -> Any:
    """Demultiplex the span, or the whole file if that fails: the FLAC demuxer cannot seek close to the end."""
    try:
        return demuxer.demux_audio(span)
    except RuntimeError:
        with io_.Demuxer(source) as fresh_demuxer:
            return fresh_demuxer.demux_audio()


def _random_starts(seconds: float, kind: Recordings) -> Sequence[float]:
    return sorted(random.uniform(0, max(0.0, seconds - kind.window)) for _ in range(kind.per_file))


def _finished(windows: Sequence[torch.Tensor], kind: Recordings) -> torch.Tensor:
    """Cut or pad the windows to the exact length, and compute spectrograms if `kind` has mels."""
    length = kind.window * RATE
    sound = torch.stack(
        [torch.nn.functional.pad(one[:, :length], (0, max(0, length - one.shape[1]))) for one in windows]
    )
    return _mels(sound, kind.n_mels) if kind.n_mels else sound


def _mels(sound: torch.Tensor, n_mels: int) -> torch.Tensor:
    """Compute log-mel spectrograms as torchaudio's MelSpectrogram does.

    The steps are STFT, power, mel filters, and then the logarithm. The window and the filters are cached.
    """
    window, filters = _mel_filters(n_mels)
    spectrum = torch.stft(sound[:, 0], 400, 160, window=window, return_complex=True)
    return (filters @ spectrum.abs().square()).clamp(min=1e-10).log()[:, None]


@functools.cache
def _mel_filters(n_mels: int) -> tuple[torch.Tensor, torch.Tensor]:
    edges = 700 * (10 ** (torch.linspace(0, 2840.02, n_mels + 2) / 2595) - 1)
    hertz, low, middle, high = torch.linspace(0, RATE / 2, 201), edges[:-2, None], edges[1:-1, None], edges[2:, None]
    filters = torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)
    return torch.hann_window(400), filters


def _headrace(source: Source, kind: Recordings) -> Iterator[torch.Tensor]:
    from headrace.loaders import AudioLoader, LogMel, Window
    from headrace.loaders.audio.spec import Features

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS, "sample_rate": RATE}
    window = Window(kind.window, per_sample=kind.per_file)
    features: Features = LogMel(kind.n_mels) if kind.n_mels else "waveform"
    with AudioLoader(source.url("dataset"), BATCH, window=window, features=features, **options) as loader:
        for batch in loader:
            yield batch["mel" if kind.n_mels else "audio"]


class _Marked:
    """The bytes of a file, with the frames that the index marks."""

    def __init__(self, data: memoryview, marks: Sequence[tuple[int, int]]) -> None:
        self.data, self.marks = data, marks

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, where: slice) -> memoryview:
        return self.data[where]


def _decoder_only(source: Source, kind: Recordings) -> Iterator[torch.Tensor]:
    """The upper bound ("floor"): Headrace's decoder without the loader."""
    from headrace.dataio.shards.sample import Sample
    from headrace.loaders.audio.decode import decode_audio
    from headrace.loaders.audio.mel import log_mel
    from headrace.loaders.audio.spec import AudioSpec, LogMel, Window, begin
    from headrace.loaders.interfaces import SampleRef

    spec, window = AudioSpec(RATE, seconds=kind.window), Window(kind.window, per_sample=kind.per_file)

    def decode_sample(sample: Sample, bytes_: memoryview) -> torch.Tensor:
        sounds, info, pieces = list[torch.Tensor](), sample.audio, sample.members[0].pieces
        assert info is not None
        data = _Marked(bytes_, pieces.marks) if pieces is not None and pieces.marks else bytes_
        for number in range(kind.per_file):
            start = begin(info, window, SampleRef(0, sample.id, sample, number))
            sound, _ = decode_audio(data, info, start, spec, spec.samples(), True)
            sounds.append(torch.from_numpy(sound))
        return torch.stack([log_mel(sound, RATE, LogMel(kind.n_mels)) for sound in sounds] if kind.n_mels else sounds)

    return loaders.decoder_only(decode_sample, source, kind)


def _spdl_named(named: tuple[str, bytes | str], kind: Recordings) -> torch.Tensor:
    number = int(named[0].partition(".")[0])
    return spdl(named[1], kind, kind.seconds(number))
