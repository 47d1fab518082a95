"""Chooses a codec for each tensor by measurement, so that the save becomes durable sooner.

For every tensor with new chunks, each candidate codec compresses three short samples of the tensor's first new chunk.
The upload speed is measured during the upload: bytes divided by the time spent waiting for the store. Storing a raw
byte takes 1/upload seconds. Compression and upload overlap, so storing a byte compressed takes the longer of two times.
One is the time to compress it, divided by the number of threads. The other is its compressed size divided by the upload
speed. The codec with the shortest time is chosen. Raw is chosen unless another codec is clearly faster. With "delta", a
difference from the base chunk is one more candidate, and the time to read the base counts.
Invariant: until the upload speed is known everything is stored raw. So a save takes no longer than without
compression, except for the samples.
Failure behaviour: it raises no errors of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.checkpoint.format import chunking, codec
from headrace.checkpoint.format.chunking import Layout, PieceSpan, TensorSpec
from headrace.checkpoint.format.manifest import DELTAS, PLANES, RAW, ZSTD
from headrace.checkpoint.saving.dedup import DeltaBases, Stored
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.store.base import Buffer

_RUN = 64 * KIB
_RUNS = 3
_KNOWN_BYTES, _KNOWN_SECONDS = 48 * MIB, 0.02
"""The speed counts as known after this many bytes and seconds, because the store first fills its own buffers."""
_CLEARLY = 0.95
_HASH_SECONDS = 1 / 5e9
"""Seconds to hash one byte with BLAKE3, on the same threads."""
_KEY_FRAME = 0.6
"""A difference is used only if it is smaller than this fraction of the chunk stored alone. Else, a new base is better.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """A codec's measured result for a tensor.

    `ratio`: compressed size over raw size. `seconds`: time to compress one raw byte on one core.
    """

    kind: int
    ratio: float
    seconds: float


def decide(samples: Sequence[Sample], upload: float | None, threads: int) -> int:
    """Choose the codec for a tensor. This is a pure function.

    `upload`: the upload speed in bytes per second; None while it is unknown.
    """
    if not upload:
        return RAW
    raw = max(1 / upload, _HASH_SECONDS / threads)
    best, kind = raw * _CLEARLY, RAW
    for sample in samples:
        needs = max((sample.seconds + _HASH_SECONDS) / threads, sample.ratio / upload)
        if sample.ratio < codec.WORTH and needs < best:
            best, kind = needs, sample.kind
    return kind


def candidates(item_bytes: int) -> tuple[int, ...]:
    """The codecs to try for elements of `item_bytes` bytes."""
    return (ZSTD, *(kind for kind, width in PLANES.items() if width == item_bytes))


def _sample_starts(size: int) -> list[int]:
    """Start offsets of the samples of a chunk of `size` bytes: at its beginning, in its middle and at its end."""
    last = max(size - _RUN, 0) // 8 * 8
    return sorted({last * i // (_RUNS - 1) // 8 * 8 for i in range(_RUNS)})


def measure(payload: memoryview, kinds: Sequence[int]) -> list[Sample]:
    """Compress the samples of a chunk with each codec."""
    runs = [payload[start : start + _RUN] for start in _sample_starts(len(payload))]
    total = sum(len(run) for run in runs)
    samples = []
    for kind in kinds:
        began = time.thread_time()  # CPU time, so that other processes do not distort it
        size = sum(len(codec.compress(run, kind)) for run in runs)
        samples.append(Sample(kind, size / max(total, 1), (time.thread_time() - began) / max(total, 1)))
    return samples


def measure_difference(payload: memoryview, base: memoryview, kind: int, reading: float) -> Sample:
    """As `measure`, for the difference from `base`. `reading`: seconds that reading the base took."""
    runs = [(payload[start : start + _RUN], base[start : start + _RUN]) for start in _sample_starts(len(payload))]
    total = sum(len(run) for run, _ in runs)
    began = time.thread_time()
    size = sum(len(codec.compress_difference(run, other, kind)) for run, other in runs)
    return Sample(kind, size / max(total, 1), (time.thread_time() - began) / max(total, 1) + reading / len(payload))


def worth_delta(difference: Sample, alone: Sequence[Sample]) -> bool:
    """Whether the difference is small enough to be better than a new base. This is a pure function.

    A new base would make later differences smaller.
    """
    return difference.ratio < _KEY_FRAME * min([1.0, *(sample.ratio for sample in alone)])


@dataclass(frozen=True, slots=True)
class Packed:
    """The stored bytes of a chunk, its codec and, for a difference, its base."""

    stored: Buffer
    kind: int
    base: Stored | None = None


class UploadSpeed:
    """Measures how fast the store takes bytes while the saver waits for it.

    `hint`: the speed that an earlier save measured.
    """

    def __init__(self, hint: float = 0.0) -> None:
        self._hint = hint
        self.bytes, self.seconds = 0, 0.0

    def took(self, count: int, seconds: float) -> None:
        """Record that the store took `count` bytes while the saver waited for `seconds`."""
        self.bytes += count
        self.seconds += seconds

    @property
    def speed(self) -> float | None:
        """Bytes per second; None while it is unknown."""
        if self.bytes >= _KNOWN_BYTES and self.seconds >= _KNOWN_SECONDS:
            return self.bytes / self.seconds
        return self._hint or None


class CodecChooser:
    """Chooses the codec of every piece of one save and encodes new chunks. Thread-safe.

    A tensor's measurement is kept for the rest of the save. `upload` measures the speed of the store.
    """

    def __init__(
        self,
        compression: str,
        *,
        specs: Sequence[TensorSpec],
        layout: Layout,
        spans: Sequence[Sequence[PieceSpan]],
        upload: UploadSpeed,
        threads: int,
        bases: DeltaBases | None = None,
    ) -> None:
        self._compression, self.upload, self._threads, self._bases = compression, upload, threads, bases
        self._tensor_of = {
            span.piece: i for i, own in enumerate(spans) for span in own if layout.offsets[i] >= layout.small_bytes
        }
        self._widths = [chunking.ITEM_BYTES[spec.dtype] for spec in specs]
        self._samples: dict[int | None, list[Sample]] = {}
        self._lock = threading.Lock()

    def pack(self, piece: int, payload: memoryview) -> Packed:
        """Encode a new chunk."""
        kind = self.kind(piece, payload)
        if kind in DELTAS:
            return self._difference(piece, payload, kind)
        return Packed(*codec.pack(payload, kind))

    def kind(self, piece: int, payload: memoryview) -> int:
        """The codec for a new chunk. The common stream of small tensors counts as one tensor of 4-byte elements."""
        if self._compression == "none":
            return RAW
        if self._compression == "zstd":
            return ZSTD
        speed = self.upload.speed
        return decide(self._measured(piece, payload), speed, self._threads) if speed else RAW

    def _measured(self, piece: int, payload: memoryview) -> list[Sample]:
        tensor = self._tensor_of.get(piece)
        with self._lock:
            samples = self._samples.get(tensor)
        if samples is None:
            width = 4 if tensor is None else self._widths[tensor]
            samples = measure(payload, candidates(width))
            samples += self._measured_difference(piece, payload, width, samples)
            with self._lock:
                self._samples[tensor] = samples
        return samples

    def _measured_difference(self, piece: int, payload: memoryview, width: int, alone: list[Sample]) -> list[Sample]:
        kinds = [kind for kind, inner in DELTAS.items() if PLANES[inner] == width]
        if not kinds or self._bases is None or self._bases.of(piece) is None:
            return []
        began = time.perf_counter()
        base = self._bases.read(piece)
        if base is None:
            return []
        sample = measure_difference(payload, base, kinds[0], time.perf_counter() - began)
        return [sample] if worth_delta(sample, alone) else []

    def _difference(self, piece: int, payload: memoryview, kind: int) -> Packed:
        """Encode the chunk as a difference from its base.

        Encode it alone if the base cannot be read, or if the difference is not clearly smaller.
        """
        assert self._bases is not None
        on = self._bases.of(piece)
        base = self._bases.read(piece) if on is not None else None
        if base is not None:
            stored = codec.encode_difference(payload, base, self._bases.link(piece), kind)
            if len(stored) < codec.WORTH * len(payload):
                return Packed(stored, kind, on)
        return Packed(*codec.pack(payload, DELTAS[kind]))
