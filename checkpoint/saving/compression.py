"""Chooses a codec for each tensor by measurement, so that the save becomes durable sooner.

For every tensor with new chunks, three short runs of its first new chunk are compressed by each candidate. The speed
of the upload is measured while it runs: bytes over the time that the store was waited for. Storing a raw byte takes
1/upload seconds. Storing it compressed takes the longer of the time to compress it (over the threads) and
size/upload, since both overlap. The shortest wins; raw wins unless another is clearly shorter. With "delta", a
difference from the base chunk is one more candidate, and reading the base counts as time.
Invariant: until the upload's speed is known everything is stored raw, so a save takes no longer than without
compression, except for the samples.
Failure behaviour: none.
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
"""What the store takes into its own buffers at first says nothing of its speed."""
_CLEARLY = 0.95
_HASH_SECONDS = 1 / 5e9
"""Of a byte, on the same threads (BLAKE3)."""
_KEY_FRAME = 0.6
"""A difference that is not smaller than this part of what the chunk takes by itself makes a new base worth more."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a codec makes of a tensor: size by size, and seconds for each raw byte on one core."""

    kind: int
    ratio: float
    seconds: float


def decide(samples: Sequence[Sample], upload: float | None, threads: int) -> int:
    """The codec for a tensor, with `upload` in bytes per second. Pure."""
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
    """The codecs worth trying for elements of so many bytes."""
    return (ZSTD, *(kind for kind, width in PLANES.items() if width == item_bytes))


def _starts(size: int) -> list[int]:
    """Of the runs that stand for so many bytes: at the beginning, in the middle and at the end."""
    last = max(size - _RUN, 0) // 8 * 8
    return sorted({last * i // (_RUNS - 1) // 8 * 8 for i in range(_RUNS)})


def measure(payload: memoryview, kinds: Sequence[int]) -> list[Sample]:
    """Compress some runs."""
    runs = [payload[start : start + _RUN] for start in _starts(len(payload))]
    total = sum(len(run) for run in runs)
    found = []
    for kind in kinds:
        began = time.thread_time()  # not what others do to this machine
        size = sum(len(codec.compress(run, kind)) for run in runs)
        found.append(Sample(kind, size / max(total, 1), (time.thread_time() - began) / max(total, 1)))
    return found


def measure_difference(payload: memoryview, base: memoryview, kind: int, reading: float) -> Sample:
    """As `measure`, of the difference from a base that took `reading` seconds to be read."""
    runs = [(payload[start : start + _RUN], base[start : start + _RUN]) for start in _starts(len(payload))]
    total = sum(len(run) for run, _ in runs)
    began = time.thread_time()
    size = sum(len(codec.compress_difference(run, other, kind)) for run, other in runs)
    return Sample(kind, size / max(total, 1), (time.thread_time() - began) / max(total, 1) + reading / len(payload))


def worth_delta(difference: Sample, alone: Sequence[Sample]) -> bool:
    """Whether the difference is so small that it beats a new base, to which later chunks would have smaller ones. Pure."""
    return difference.ratio < _KEY_FRAME * min([1.0, *(sample.ratio for sample in alone)])


@dataclass(frozen=True, slots=True)
class Packed:
    """What is stored of a chunk; of a difference, with its base."""

    stored: Buffer
    kind: int
    base: Stored | None = None


class UploadSpeed:
    """How fast the store takes bytes: counted where it is waited for. `hint`: what an earlier save found."""

    def __init__(self, hint: float = 0.0) -> None:
        self._hint = hint
        self.bytes, self.seconds = 0, 0.0

    def took(self, count: int, seconds: float) -> None:
        """The store was waited for so long while it took `count` bytes."""
        self.bytes += count
        self.seconds += seconds

    @property
    def speed(self) -> float | None:
        """Bytes per second, None while it is not known."""
        if self.bytes >= _KNOWN_BYTES and self.seconds >= _KNOWN_SECONDS:
            return self.bytes / self.seconds
        return self._hint or None


class CodecChooser:
    """The codec of every piece of one save. Asked from several threads; a tensor is measured once."""

    def __init__(
        self,
        compression: str,
        specs: Sequence[TensorSpec],
        layout: Layout,
        spans: Sequence[Sequence[PieceSpan]],
        upload: UploadSpeed,
        threads: int,
        bases: DeltaBases | None = None,
    ) -> None:
        self._compression, self._upload, self._threads, self._bases = compression, upload, threads, bases
        self._tensor_of = {
            span.piece: i for i, own in enumerate(spans) for span in own if layout.offsets[i] >= layout.small_bytes
        }
        self._widths = [chunking.ITEM_BYTES[spec.dtype] for spec in specs]
        self._samples: dict[int | None, list[Sample]] = {}
        self._lock = threading.Lock()

    def pack(self, piece: int, payload: memoryview) -> Packed:
        """A new chunk, as it is to be stored."""
        kind = self.kind(piece, payload)
        if kind in DELTAS:
            return self._difference(piece, payload, kind)
        return Packed(*codec.pack(payload, kind))

    def kind(self, piece: int, payload: memoryview) -> int:
        """For a new chunk; the small tensors' common stream counts as one tensor of 4-byte elements."""
        if self._compression == "none":
            return RAW
        if self._compression == "zstd":
            return ZSTD
        speed = self._upload.speed
        return decide(self._measured(piece, payload), speed, self._threads) if speed else RAW

    def _measured(self, piece: int, payload: memoryview) -> list[Sample]:
        tensor = self._tensor_of.get(piece)
        with self._lock:
            known = self._samples.get(tensor)
        if known is None:
            width = 4 if tensor is None else self._widths[tensor]
            known = measure(payload, candidates(width))
            known += self._measured_difference(piece, payload, width, known)
            with self._lock:
                self._samples[tensor] = known
        return known

    def _measured_difference(self, piece: int, payload: memoryview, width: int, alone: list[Sample]) -> list[Sample]:
        kinds = [kind for kind, inner in DELTAS.items() if PLANES[inner] == width]
        if not kinds or self._bases is None or self._bases.of(piece) is None:
            return []
        began = time.perf_counter()
        base = self._bases.read(piece)
        if base is None:
            return []
        found = measure_difference(payload, base, kinds[0], time.perf_counter() - began)
        return [found] if worth_delta(found, alone) else []

    def _difference(self, piece: int, payload: memoryview, kind: int) -> Packed:
        """Of a tensor whose first new chunk was worth it; whole where this one has no base, or gains nothing by it."""
        assert self._bases is not None
        on = self._bases.of(piece)
        base = self._bases.read(piece) if on is not None else None
        if base is not None:
            stored = codec.encode_difference(payload, base, self._bases.link(piece), kind)
            if len(stored) < codec.WORTH * len(payload):
                return Packed(stored, kind, on)
        return Packed(*codec.pack(payload, DELTAS[kind]))
