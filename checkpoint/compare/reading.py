"""Reads the parts of two tensors that may differ, and adds up how they differ.

Parts are read in the order of their tensors by a few threads. A cache keeps the chunks that were read last, because one
chunk may hold many small tensors. Where the chunks of two tensors cannot be compared, blocks of the global tensor are
read instead.
Invariant: every chunk is compared with its digest. A chunk that both steps have is not read, unless a block needs it.
Memory: `CACHE_BYTES` of chunks, and a few MiB for each thread, or two blocks where blocks are read. It
does not depend on the sizes of the tensors.
Failure behaviour: `CorruptionError` names the step, the tensor, the pack and the offset.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace.checkpoint.compare import tensors
from headrace.checkpoint.compare.numbers import Change, compare
from headrace.checkpoint.compare.tensors import Found, Piece
from headrace.checkpoint.format.chunking import Box, nbytes
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.fetch import Step, in_order
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.chunk_reader import Saved, Want
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store

THREADS = 4
CACHE_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two steps: its store, and its manifests."""

    store: Store
    step: Step


class ChunkCache:
    """The chunks of one step that were read last. Each chunk is read once, also if two threads need it."""

    def __init__(self, side: Side) -> None:
        self._side, self._lock = side, threading.Lock()
        self._chunks: OrderedDict[bytes, Future[memoryview]] = OrderedDict()
        self._bytes = 0
        self.bytes_read = 0

    def get(self, piece: Piece, name: str) -> memoryview:
        """The bytes of the chunk that holds this piece of the tensor `name`."""
        chunk = piece.chunk
        with self._lock:
            found = self._chunks.get(chunk.digest)
            if found is not None:
                self._chunks.move_to_end(chunk.digest)
            else:
                mine = self._chunks[chunk.digest] = Future[memoryview]()
                self._add(chunk.raw, chunk.stored)
        if found is not None:
            return found.result()
        try:
            payload = fetch.read_one(self._side.store, piece.pack, chunk)
            if payload is None:
                raise self._damaged(piece, name)
            mine.set_result(payload)
        except BaseException as error:
            mine.set_exception(error)
            raise
        return payload

    def _add(self, raw: int, stored: int) -> None:
        self._bytes += raw
        self.bytes_read += stored
        while self._bytes > CACHE_BYTES and len(self._chunks) > 1:
            digest, oldest = next(iter(self._chunks.items()))
            if not oldest.done():
                return
            del self._chunks[digest]
            self._bytes -= len(oldest.result()) if oldest.exception() is None else 0

    def _damaged(self, piece: Piece, name: str) -> CorruptionError:
        step = self._side.step
        return CorruptionError(
            f"step {step.base.step} of run {step.run} is damaged: tensor {name!r:.200}, "
            f"{piece.chunk.stored} bytes at offset {piece.chunk.offset} of {piece.pack}",
            hint="compare another step; `headrace ckpt check` lists what else is damaged",
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of the same type and shape, and the parts that may differ; None if blocks must be read."""

    a: Saved
    b: Saved
    found: Found | None


class PairReader:
    """Reads pairs of tensors. `read` is called with the number of compared bytes after each part."""

    def __init__(self, a: Side, b: Side, read: Callable[[int], object] = lambda _: None) -> None:
        self._a, self._b, self._read = a, b, read
        self._chunks_a, self._chunks_b = ChunkCache(a), ChunkCache(b)

    @property
    def bytes_read(self) -> int:
        """The stored bytes of the chunks that were read, without those of blocks."""
        return self._chunks_a.bytes_read + self._chunks_b.bytes_read

    def changes(self, pairs: Iterable[Pair]) -> Iterator[Change]:
        """The change of each pair, in order."""
        with ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-diff") as pool:
            total, open_pair = Change(), -1
            for number, change in in_order(pool, self._one, self._work(pairs), 2 * THREADS):
                if number != open_pair and open_pair >= 0:
                    yield total
                    total = Change()
                open_pair = number
                total.add(change)
            if open_pair >= 0:
                yield total

    def _work(self, pairs: Iterable[Pair]) -> Iterator[tuple[int, Pair, tensors.Part | Box | None]]:
        """The parts and blocks to compare. A pair without any gives one empty item, so that it has a change."""
        for number, pair in enumerate(pairs):
            yield number, pair, None
            if pair.found is not None:
                yield from ((number, pair, part) for part in pair.found.parts)
                continue
            yield from ((number, pair, block) for block in tensors.blocks_to_read(pair.a, pair.b))

    def _one(self, work: tuple[int, Pair, tensors.Part | Box | None]) -> tuple[int, Change]:
        number, pair, what = work
        if what is None:
            return number, Change()
        if isinstance(what, Box):
            one, two = (_block(side, saved, what) for side, saved in ((self._a, pair.a), (self._b, pair.b)))
        else:
            one = self._chunks_a.get(what.a, pair.a.name)[what.at_a : what.at_a + what.length]
            two = self._chunks_b.get(what.b, pair.b.name)[what.at_b : what.at_b + what.length]
        change = compare(one, two, pair.a.dtype)
        self._read(len(one))
        return number, change


class _Memory:
    """A sink in main memory."""

    def __init__(self, size: int) -> None:
        self.data = memoryview(bytearray(size))

    def open(self) -> memoryview:
        return self.data

    def close(self) -> None:
        pass


def _block(side: Side, saved: Saved, block: Box) -> memoryview:
    """The bytes of one block of a tensor."""
    memory = _Memory(nbytes(saved.dtype, block.local))
    chunk_reader.read(side.store, side.step, [Want(saved, block, memory)])
    return memory.data
