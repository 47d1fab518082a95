"""Who delivers windows of sound: float32 (B, 1, samples) or (B, 1, bands, columns), two threads or two worker processes.

Invariant: every candidate delivers as many windows of each recording as its kind says. `bare` is the floor of ours: windows
drawn alike, read from files, decoded and resampled by as many threads, but put into no batch, by no plan, and checked by nobody.
Of long recordings, peers take all windows at once (`headrace.bench.loader.ways`), ours mixes them.
Failure behaviour: exceptions of the loaders, which end the candidate's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from headrace.bench.loader import by_ear, in_energon, in_mosaic, ways
from headrace.bench.loader.candidates import ENERGON, FLOOR, MOSAIC, OURS
from headrace.bench.loader.place import Place
from headrace.bench.loader.sounds import BATCH, RATE, Sound
from headrace.bench.loader.ways import THREADS, decoding


def _ours(place: Place, kind: Sound) -> Iterator[torch.Tensor]:
    from headrace.loaders import AudioLoader, LogMel, Window
    from headrace.loaders.sound.spec import Features

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS, "sample_rate": RATE}
    window = Window(kind.window, per_sample=kind.per_file)
    features: Features = LogMel(kind.bands) if kind.bands else "waveform"
    with AudioLoader(place.url("dataset"), BATCH, window=window, features=features, **options) as loader:
        for batch in loader:
            yield batch["mel" if kind.bands else "audio"]


class _Marked:
    """A file's bytes, and the frames in it that the index marks."""

    def __init__(self, data: memoryview, marks: Sequence[tuple[int, int]]) -> None:
        self.data, self.marks = data, marks

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, where: slice) -> memoryview:
        return self.data[where]


def _bare(place: Place, kind: Sound) -> Iterator[torch.Tensor]:
    """The decoder alone."""
    from headrace.dataio.shards.contract import Sample
    from headrace.loaders.interfaces import SampleRef
    from headrace.loaders.sound.decode import decode_audio
    from headrace.loaders.sound.features import LogMel
    from headrace.loaders.sound.mel import log_mel
    from headrace.loaders.sound.spec import AudioSpec
    from headrace.loaders.sound.window import Window, begin

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

    return ways.alone(one, place, kind)


def _heard_by_spdl(named: tuple[str, bytes | str], kind: Sound) -> torch.Tensor:
    number = int(named[0].partition(".")[0])
    return by_ear.spdl(named[1], kind, kind.seconds(number))


def _peers(name: str, decode: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Those that decode with whom one chooses, and the packages that they need."""
    package = () if name == "PyAV" else (name,)
    return {
        f"webdataset + {name}, 0 workers": (decoding(decode, ways.webdataset, 0), ("webdataset", *package)),
        f"webdataset + {name}, 2 workers": (decoding(decode, ways.webdataset, 2), ("webdataset", *package)),
        f"torchdata StatefulDataLoader + {name}, 2 workers": (
            decoding(decode, ways.torchdata),
            ("torchdata", *package),
        ),
        f"litdata + {name}, 2 workers": (decoding(decode, ways.litdata), ("litdata", *package)),
        f"{name}, 2 threads": (decoding(decode, ways.threads), package),
    }


_TORCHCODEC = {
    "webdataset + torchcodec, 2 workers": (
        decoding(by_ear.torchcodec, ways.webdataset, 2),
        ("webdataset", "torchcodec"),
    ),
    "torchcodec, 2 threads": (decoding(by_ear.torchcodec, ways.threads), ("torchcodec",)),
    "SPDL, 2 threads": (decoding(_heard_by_spdl, ways.spdl), ("spdl",)),
    ENERGON: (decoding(by_ear.pyav, in_energon.batches), ("megatron.energon",)),
    MOSAIC: (decoding(by_ear.pyav, in_mosaic.batches), ("streaming",)),
}
_OURS: dict[str, Callable[[Place, Sound], Iterator[torch.Tensor]]] = {OURS: _ours, FLOOR: _bare}


def peers(kind: Sound) -> dict[str, tuple[str, ...]]:
    """Each peer and the packages that it needs."""
    return {name: packages for name, (_, packages) in _all(kind).items()}


def candidates(kind: Sound) -> dict[str, Callable[[Place, Sound], Iterator[torch.Tensor]]]:
    """soundfile reads no M4A, so those recordings are decoded by PyAV."""
    return _OURS | {name: run for name, (run, _) in _all(kind).items()}


def _all(kind: Sound) -> dict[str, tuple[Any, tuple[str, ...]]]:
    by_choice = _peers("PyAV", by_ear.pyav) if kind.sought else _peers("soundfile", by_ear.soundfile)
    return by_choice | _TORCHCODEC
