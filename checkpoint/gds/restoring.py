"""Restores raw chunks from packs into GPU memory by cuFile.

cuFile reads a chunk into a device buffer. The chunk is copied to the host and hashed. Only then does the device copy it
to the tensors. Host tensors that share the chunk are filled from the host copy. `GdsStore` wraps the directory store;
only raw chunks take this path.
Invariant: only bytes with the right digest reach a caller's memory. At most `_THREADS` chunks are in flight. A tensor
is read in this way only if all of its chunks are raw and aligned. Other tensors go through host memory.
Failure behaviour: after a damaged chunk or a failed transfer, the store reads the chunk again, also from its other
copies. If all are damaged, `CorruptionError` is raised. `direct_for` never raises. If cuFile cannot be used, it returns
None and logs the reason once.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import torch

from headrace.checkpoint import sharding
from headrace.checkpoint.format import chunking
from headrace.checkpoint.format.chunking import CHUNK_BYTES, digest
from headrace.checkpoint.format.manifest import RAW
from headrace.checkpoint.gds.file import ALIGNMENT, CUFILE, FILE, Direct, GpuFile, directory_of, flat_bytes, probe
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.fetch import in_order
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, NeededChunk
from headrace.checkpoint.state.tensors import memory_of
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.base import Store
from headrace.dataio.store.wrappers import Wrapper

_THREADS = 2
_log = get_logger(__name__)
Place = tuple[str, NeededChunk]


class DirectReader:
    """Reads the chunks of a `ChunkReader` that go into device memory.

    `root`: the directory of the store's objects.
    """

    def __init__(self, reading: ChunkReader, *, direct: Direct, store: Store, root: str) -> None:
        self._reading, self._direct, self._store, self._root = reading, direct, store, root
        self._thread = local()
        self._buffers: list[torch.Tensor] = []
        self._files: list[GpuFile] = []
        self.direct_bytes = 0

    def read(self, chunks: Iterable[Place]) -> list[Place]:
        """Read the chunks that can go by cuFile; return those that are left to read through host memory."""
        places = list(chunks)
        targets = self._targets(places)
        selected = [place for place in places if any(use.want in targets for use in place[1].uses)]
        self._grids = targets
        try:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="headrace-gds") as pool:
                for size in in_order(pool, self._read_chunk, selected, 2 * _THREADS):
                    self.direct_bytes += size
        finally:
            for buffer in self._buffers:
                self._direct.release(buffer)
            for file in self._files:
                file.close()
        return [place for place in places if not any(use.want in targets for use in place[1].uses)]

    def _targets(self, places: Sequence[Place]) -> dict[int, torch.Tensor]:
        """The wanted tensors to fill by cuFile, by number, each as a view with a last dimension for an element's bytes.

        A tensor is left out if one of its chunks is not given (another rank sends it), is not raw or is not aligned.
        """
        counts = Counter(use.want for _, chunk in places for use in chunk.uses)
        bad = {use.want for _, chunk in places for use in chunk.uses if chunk.codec != RAW or chunk.offset % ALIGNMENT}
        targets: dict[int, torch.Tensor] = {}
        for number, count in counts.items():
            want = self._reading.wants[number]
            tensor: Any = getattr(want.sink, "direct_target", None)
            is_whole = number not in bad and count == self._reading.remaining(number)
            if is_whole and tensor is not None and self._direct.reaches(tensor):
                targets[number] = flat_bytes(tensor).view(*want.box.local, chunking.ITEM_BYTES[want.saved.dtype])
        return targets

    def _read_chunk(self, place: Place) -> int:
        key, chunk = place
        device = next(self._grids[use.want].device for use in chunk.uses if use.want in self._grids)
        device_buffer, host_buffer = self._buffer(device)
        device_bytes, host_bytes = device_buffer[: chunk.stored], host_buffer[: chunk.stored]
        if self._read_into(key, chunk, device_buffer):
            host_bytes.copy_(device_bytes)
            self._direct.synchronize(device)
            if digest(payload := memory_of(host_bytes)) == chunk.digest:
                self._use(chunk, device_bytes, payload)
                self._direct.synchronize(device)
                return chunk.stored
        self._read_by_host(key, chunk, device_bytes)
        return 0

    def _read_into(self, key: str, chunk: NeededChunk, buffer: torch.Tensor) -> bool:
        """Read the chunk into the device buffer, unchecked; False if cuFile failed."""
        try:
            file = self._file(key)
            blocks = -(-chunk.stored // ALIGNMENT) * ALIGNMENT  # whole blocks, because a pack continues after the chunk
            size = blocks if chunk.offset + blocks <= file.size else chunk.stored
            file.read(buffer[:size], chunk.offset)
            return True
        except (OSError, TransientError) as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            message = f"cuFile could not read from {self._root}, reading through host memory: {reason}"
            warn_once(_log, message, "node")
            return False

    def _file(self, key: str) -> GpuFile:
        """The open pack. This thread keeps it open until it needs another."""
        if getattr(self._thread, "key", None) != key:
            if getattr(self._thread, "key", None) is not None:
                self._thread.file.close()
            self._thread.key = None
            self._thread.file = GpuFile(f"{self._root}/{key}", direct=self._direct)
            self._thread.key = key
            self._files.append(self._thread.file)
        opened: GpuFile = self._thread.file
        return opened

    def _read_by_host(self, key: str, chunk: NeededChunk, device_bytes: torch.Tensor) -> None:
        def use(pack: str, needed: NeededChunk, payload: memoryview | None) -> None:
            if payload is None:
                raise self._reading.damaged(pack, needed)
            device_bytes.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            self._use(needed, device_bytes, payload)
            self._direct.synchronize(device_bytes.device)

        fetch.fetch(self._store, self._reading.batches([(key, chunk)]), use)

    def _use(self, chunk: NeededChunk, device_bytes: torch.Tensor, host_bytes: memoryview) -> None:
        for use in chunk.uses:
            want, grid = self._reading.wants[use.want], self._grids.get(use.want)
            if grid is None:
                self._reading.put(use, host_bytes)
                continue
            payload = device_bytes[use.start : use.start + use.length]
            item = chunking.ITEM_BYTES[want.saved.dtype]
            for offset, extent, source, target in sharding.overlap_blocks(
                use.shard, want.box, item, use.at, use.length
            ):
                size = math.prod(extent)
                grid[target].copy_(payload[offset : offset + size].view(extent)[source])
            self._reading.done(use.want)

    def _buffer(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """This thread's buffers for one chunk: on the device, and in pinned host memory."""
        if getattr(self._thread, "device_bytes", None) is None or self._thread.device_bytes.device != device:
            self._thread.device_bytes = self._direct.buffer(CHUNK_BYTES, device)
            self._thread.host_bytes = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._buffers.append(self._thread.device_bytes)
        return self._thread.device_bytes, self._thread.host_bytes


def direct_for(store: Store, gds: bool | Direct) -> Direct | None:
    """The `Direct` to use with this store; None if there is none.

    `gds` True means cuFile, if it works in the directory.
    """
    if not gds:
        return None
    url = store.location.url
    if not url.startswith(FILE):
        warn_once(
            _log, f"GPUDirect Storage: not available, {url} is no directory; copies go through host memory", "job"
        )
        return None
    if isinstance(gds, Direct):
        return gds
    verdict = probe(_existing_parent(directory_of(store)))
    if not verdict.available:
        warn_once(_log, str(verdict), "node")
        return None
    _log.info("%s", verdict)
    return CUFILE


class GdsStore(Wrapper):
    """Wraps the directory store `inner` and reads with `direct`. `direct_bytes`: bytes that `direct` has read."""

    def __init__(self, inner: Store, direct: Direct) -> None:
        super().__init__(inner)
        self._direct, self.direct_bytes = direct, 0

    def read_directly(self, reading: ChunkReader, chunks: Iterable[Place]) -> list[Place]:
        """Implements `chunk_reader.ReadsDirectly`."""
        work = DirectReader(reading, direct=self._direct, store=self.inner, root=directory_of(self.inner))
        remaining = work.read(chunks)
        self.direct_bytes += work.direct_bytes
        return remaining


def _existing_parent(path: str) -> str:
    """The directory, or its closest existing parent, because a store creates its directory at the first write."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
