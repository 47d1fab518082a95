"""Published tensors in the staging memory of their save, where a publisher compares them without reading the step back.

Purpose: `StagedStep` finds the tensors that this rank staged whole, and gives their blocks. `require_same` compares the
chunks that the blocks came from with those of the step.
Invariant: every chunk that a block came from is hashed. A version is published only if these digests are those of the
step. The next save gets the memory at once: it waits only for the blocks that threads are comparing.
Failure behaviour: a block is None once the next save has taken the memory. `StagedMemoryError` if the memory holds other
bytes than the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.checkpoint.format.chunking import Piece, PieceSpan, cut_all, digest
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.publishing.difference import Bytes
from headrace.checkpoint.saving.arena import StagedCopy, Staging
from headrace.dataio.core.errors import CorruptionError


class StagedMemoryError(CorruptionError):
    """Staging memory holds other bytes than the committed step."""


class StagedStep:
    """The tensors of a save in staging memory.

    Args:
        staging: the memory.
        copy: what it holds.
    """

    def __init__(self, staging: Staging, copy: StagedCopy) -> None:
        self._staging, self._copy = staging, copy
        self._pieces, self._spans = cut_all(copy.specs, copy.layout)
        self._digests = dict[int, bytes]()
        self._used = set[int]()
        self._numbers = {
            (spec.name, spec.dtype, spec.box.shape): number
            for number, spec in enumerate(copy.specs)
            if spec.box.local == spec.box.shape
        }

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> StagedTensor | None:
        """A tensor that the rank staged whole; None if there is no such tensor."""
        number = self._numbers.get((name, dtype, shape))
        if number is None:
            return None
        self._used.add(number)
        return StagedTensor(self, self._copy.layout.offsets[number], self._spans[number])

    @contextmanager
    def memory(self) -> Iterator[Bytes | None]:
        """The staging memory. The next save waits until the block ends. None if it has taken the memory."""
        with self._staging.reading(self._copy) as memory:
            yield memory

    def hashed(self, memory: Bytes, number: int) -> tuple[Piece, bytes]:
        """A piece, which became a chunk of the step, and its digest. It is hashed once, or by two threads at a time."""
        piece = self._pieces[number]
        if number not in self._digests:
            self._digests[number] = digest(memory[piece.at : piece.at + piece.length].data)
        return piece, self._digests[number]

    def require_same(self, manifest: Manifest) -> None:
        """Raise `StagedMemoryError` unless every piece that was hashed is a chunk of the step. `manifest`: that of the rank."""
        rows = {(row.name, row.dtype, row.box): row for row in manifest.tensors}
        for number in self._used:
            spec, spans = self._copy.specs[number], self._spans[number]
            row = rows.get((spec.name, spec.dtype, spec.box))
            stored = row.spans if row is not None else ()
            same = len(stored) == len(spans) and all(
                (a.start, a.length) == (b.start, b.length)
                and self._digests.get(a.piece, manifest.chunks[b.chunk].digest) == manifest.chunks[b.chunk].digest
                for a, b in zip(spans, stored, strict=True)
            )
            if not same:
                raise StagedMemoryError(f"staging memory does not hold {spec.name!r:.200} as it was saved")


class StagedTensor:
    """A tensor in staging memory. `at`: its first byte there."""

    def __init__(self, step: StagedStep, at: int, spans: tuple[PieceSpan, ...]) -> None:
        self._step, self._at, self._spans = step, at, spans
        ends, end = [], 0
        for span in spans:
            end += span.length
            ends.append(end)
        self._ends = ends

    @contextmanager
    def read(
        self, start: int, end: int, saved: torch.dtype, dtype: torch.dtype
    ) -> Iterator[tuple[Bytes, bytes] | None]:
        """The bytes [start, end), converted from `saved` to `dtype`, and their digest, or b"" if it is not known.

        They are valid in the block. None if the next save has taken the memory.
        """
        with self._step.memory() as memory:
            if memory is None:
                yield None
                return
            first, last = bisect_right(self._ends, start), bisect_right(self._ends, max(end - 1, start))
            pieces = [self._step.hashed(memory, span.piece) for span in self._spans[first : last + 1]]
            data = memory[self._at + start : self._at + end]
            if saved != dtype:
                yield _converted(data, saved, dtype), b""
                return
            alone = len(pieces) == 1 and (pieces[0][0].at, pieces[0][0].length) == (self._at + start, end - start)
            yield data, pieces[0][1] if alone else b""


def _converted(data: Bytes, saved: torch.dtype, dtype: torch.dtype) -> Bytes:
    converted: Bytes = torch.from_numpy(data).view(saved).to(dtype).view(torch.uint8).numpy()
    return converted
