"""Candidates for audio: Headrace, the floor, and the peers with soundfile, torchcodec, PyAV or SPDL.

A peer gets the bytes of a file, a path or a file object; SPDL gets a URL in place of a file object. The floor is our
decoder alone: the same windows, read from files, decoded and resampled by as many threads, without batches, plan or
digests.
Invariant: each delivers float32 (windows of a file, 1, samples) at 16 kHz from random starts, or their log-mel
spectrograms (windows, 1, bands, columns), padded with zeros at the end. Peers take all windows of a file from one open
file, in order of time. Headrace mixes the windows of different files in a batch.
Failure behaviour: exceptions of the libraries, which end the candidate's process.
"""

from __future__ import annotations

import functools
import importlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from headrace.bench.peers import peer_loaders
from headrace.bench.peers.peer_loaders import THREADS, decoding
from headrace.bench.peers.video_peers import ENERGON, FLOOR, MOSAIC, OURS
from headrace.bench.workloads.audio import BATCH, RATE, Sound
from headrace.bench.workloads.source import Place


def soundfile(source: Any, kind: Sound) -> torch.Tensor:
    """Seek to a random start and read. soxr resamples other rates, as in librosa. soundfile reads no M4A."""
    soundfile: Any = importlib.import_module("soundfile")
    windows = list[torch.Tensor]()
    with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
        for start in _starts(len(file) / file.samplerate, kind):
            file.seek(int(start * file.samplerate))
            found = file.read(kind.window * file.samplerate, dtype="float32", always_2d=True).mean(axis=1)
            if file.samplerate != RATE:
                found = importlib.import_module("soxr").resample(found, file.samplerate, RATE)
            windows.append(torch.from_numpy(found)[None])
    return _finished(windows, kind)


def torchcodec(source: Any, kind: Sound) -> torch.Tensor:
    """Decode ranges of seconds, as the documentation shows. torchcodec resamples and downmixes while it decodes."""
    decoder = importlib.import_module("torchcodec.decoders").AudioDecoder(source, sample_rate=RATE, num_channels=1)
    seconds = decoder.metadata.duration_seconds_from_header or 0.0
    starts = _starts(seconds, kind)
    return _finished([decoder.get_samples_played_in_range(at, at + kind.window).data for at in starts], kind)


def pyav(source: Any, kind: Sound) -> torch.Tensor:
    """Seek before a random start, decode from there, and resample each frame."""
    import av

    with av.open(io.BytesIO(source) if isinstance(source, bytes) else source, "r") as container:
        stream = container.streams.audio[0]
        starts = _starts(float(container.duration or 0) / 1e6, kind)
        return _finished([_pyav(container, stream, start, kind.window) for start in starts], kind)


def _pyav(container: Any, stream: Any, start: float, seconds: int) -> torch.Tensor:
    import av

    resampler = av.AudioResampler(format="fltp", layout="mono", rate=RATE)
    container.seek(int(start * 1e6))
    parts, first, there = list[torch.Tensor](), 0, 0
    for frame in container.decode(stream):
        if frame.time + frame.samples / frame.sample_rate <= start:
            continue
        if not parts:
            first = max(0, round((start - frame.time) * RATE))
        parts += [torch.from_numpy(part.to_ndarray()) for part in resampler.resample(frame)]
        there += parts[-1].shape[1] if parts else 0
        if there >= first + seconds * RATE:
            break
    return torch.cat(parts, 1)[:, first:] if parts else torch.zeros(1, 0)


def spdl(source: bytes | str, kind: Sound, seconds: int) -> torch.Tensor:
    """Demultiplex the window, then trim, resample and downmix in FFmpeg's filter graph, as SPDL does.

    SPDL gets the length of the file. The other peers find it out.
    """
    io_: Any = importlib.import_module("spdl.io")
    windows = list[torch.Tensor]()
    with io_.Demuxer(source) as demuxer:
        for start in _starts(seconds, kind):
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
        with io_.Demuxer(source) as again:
            return again.demux_audio()


def _starts(seconds: float, kind: Sound) -> Sequence[float]:
    return sorted(random.uniform(0, max(0.0, seconds - kind.window)) for _ in range(kind.per_file))


def _finished(windows: Sequence[torch.Tensor], kind: Sound) -> torch.Tensor:
    """Cut or pad the windows to the exact length, and compute spectrograms if `kind` has bands."""
    wanted = kind.window * RATE
    sound = torch.stack(
        [torch.nn.functional.pad(one[:, :wanted], (0, max(0, wanted - one.shape[1]))) for one in windows]
    )
    return _mels(sound, kind.bands) if kind.bands else sound


def _mels(sound: torch.Tensor, bands: int) -> torch.Tensor:
    """Compute log-mel spectrograms as torchaudio's MelSpectrogram does: STFT, power, mel filters, and then the
    logarithm.

    The window and the filters are cached.
    """
    window, filters = _kept(bands)
    spectrum = torch.stft(sound[:, 0], 400, 160, window=window, return_complex=True)
    return (filters @ spectrum.abs().square()).clamp(min=1e-10).log()[:, None]


@functools.cache
def _kept(bands: int) -> tuple[torch.Tensor, torch.Tensor]:
    edges = 700 * (10 ** (torch.linspace(0, 2840.02, bands + 2) / 2595) - 1)
    hertz, low, middle, high = torch.linspace(0, RATE / 2, 201), edges[:-2, None], edges[1:-1, None], edges[2:, None]
    filters = torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)
    return torch.hann_window(400), filters


def _headrace_audio(place: Place, kind: Sound) -> Iterator[torch.Tensor]:
    from headrace.loaders import AudioLoader, LogMel, Window
    from headrace.loaders.audio.spec import Features

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS, "sample_rate": RATE}
    window = Window(kind.window, per_sample=kind.per_file)
    features: Features = LogMel(kind.bands) if kind.bands else "waveform"
    with AudioLoader(place.url("dataset"), BATCH, window=window, features=features, **options) as loader:
        for batch in loader:
            yield batch["mel" if kind.bands else "audio"]


class _Marked:
    """The bytes of a file, with the frames that the index marks."""

    def __init__(self, data: memoryview, marks: Sequence[tuple[int, int]]) -> None:
        self.data, self.marks = data, marks

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, where: slice) -> memoryview:
        return self.data[where]


def _bare_audio(place: Place, kind: Sound) -> Iterator[torch.Tensor]:
    """The floor: Headrace's decoder without the loader."""
    from headrace.dataio.shards.sample import Sample
    from headrace.loaders.audio.decode import decode_audio
    from headrace.loaders.audio.mel import log_mel
    from headrace.loaders.audio.spec import AudioSpec, LogMel, Window, begin
    from headrace.loaders.interfaces import SampleRef

    spec, window = AudioSpec(RATE, seconds=kind.window), Window(kind.window, per_sample=kind.per_file)

    def one(sample: Sample, bytes_: memoryview) -> torch.Tensor:
        found, info, pieces = list[torch.Tensor](), sample.audio, sample.members[0].pieces
        assert info is not None
        data = _Marked(bytes_, pieces.marks) if pieces is not None and pieces.marks else bytes_
        for number in range(kind.per_file):
            start = begin(info, window, SampleRef(0, sample.id, sample, number))
            sound, _ = decode_audio(data, info, start, spec, spec.samples(), True)
            found.append(torch.from_numpy(sound))
        return torch.stack([log_mel(sound, RATE, LogMel(kind.bands)) for sound in found] if kind.bands else found)

    return peer_loaders.alone(one, place, kind)


def _spdl_named(named: tuple[str, bytes | str], kind: Sound) -> torch.Tensor:
    number = int(named[0].partition(".")[0])
    return spdl(named[1], kind, kind.seconds(number))


def _peers(name: str, decode: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return the peers that take any decoder, here `decode`, and the packages that they need."""
    package = () if name == "PyAV" else (name,)
    return {
        f"webdataset + {name}, 0 workers": (decoding(decode, peer_loaders.webdataset, 0), ("webdataset", *package)),
        f"webdataset + {name}, 2 workers": (decoding(decode, peer_loaders.webdataset, 2), ("webdataset", *package)),
        f"torchdata StatefulDataLoader + {name}, 2 workers": (
            decoding(decode, peer_loaders.torchdata),
            ("torchdata", *package),
        ),
        f"litdata + {name}, 2 workers": (decoding(decode, peer_loaders.litdata), ("litdata", *package)),
        f"{name}, 2 threads": (decoding(decode, peer_loaders.threads), package),
    }


_OTHERS = {
    "webdataset + torchcodec, 2 workers": (
        decoding(torchcodec, peer_loaders.webdataset, 2),
        ("webdataset", "torchcodec"),
    ),
    "torchcodec, 2 threads": (decoding(torchcodec, peer_loaders.threads), ("torchcodec",)),
    "SPDL, 2 threads": (decoding(_spdl_named, peer_loaders.spdl), ("spdl",)),
    ENERGON: (decoding(pyav, peer_loaders.energon), ("megatron.energon",)),
    MOSAIC: (decoding(pyav, peer_loaders.mosaic), ("streaming",)),
}
_OWN: dict[str, Callable[[Place, Sound], Iterator[torch.Tensor]]] = {OURS: _headrace_audio, FLOOR: _bare_audio}


def peers(kind: Sound) -> dict[str, tuple[str, ...]]:
    """Return each peer, with the packages that it needs."""
    return {name: packages for name, (_, packages) in _all(kind).items()}


def candidates(kind: Sound) -> dict[str, Callable[[Place, Sound], Iterator[torch.Tensor]]]:
    """Return the candidates by name. Long recordings are decoded by PyAV, because soundfile reads no M4A."""
    return _OWN | {name: run for name, (run, _) in _all(kind).items()}


def _all(kind: Sound) -> dict[str, tuple[Any, tuple[str, ...]]]:
    by_choice = _peers("PyAV", pyav) if kind.sought else _peers("soundfile", soundfile)
    return by_choice | _OTHERS
