"""Decoding with NVIDIA DALI: H.264, HEVC, VP9 and AV1 on a GPU; VP8, VP9 and MJPEG on the CPU for who asks for it.

Purpose: the fast path, under the same contract as PyAV's.
Invariants: DALI never sees a whole file, only the packets that `trim` selected and checked, so it cannot run dry in the
middle and pad with zeros. Every request carries a number through the graph, which must come out beside its frames. After
any error the pipeline is thrown away (building one takes milliseconds) and the requests are run again one by one in new
ones, so that the culprit is named and the others are decoded.
Failure behaviour: as the contract says. `UnsupportedError` at construction where DALI is not installed, or no GPU is there.

DALI keeps buffers by reference (`no_copy`); they live here until the outputs were copied.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.loaders.decode import nvdec, resize
from headrace.loaders.decode.contract import Decoded, Request
from headrace.loaders.decode.trim import mux, open_window

GPU_BATCH = 16
"""Clips that one run of the GPU pipeline decodes together."""
GPU_THREADS = 4
"""Clips of a run that are decoded at once: each thread of DALI keeps one of the card's decoders (up to seven) busy, and waits."""
_Feed = tuple[bytes, tuple[int, ...]]
_Wanted = tuple[tuple[int, ...], tuple[int, ...]]
"""The frames of a clip, by their numbers, and their time stamps."""

_log = get_logger(__name__)


def _module(name: str) -> Any:
    """A module of DALI, whose types are incomplete; imported late, since it takes most of a second."""
    return importlib.import_module(name)


@functools.cache
def dali_installed() -> bool:
    """Whether DALI can be imported; it exists for Linux only."""
    try:
        _module("nvidia.dali")
    except ImportError:
        return False
    return True


@functools.cache
def gpu_count() -> int:
    """The GPUs that DALI's driver interface sees; 0 without DALI, or without a driver that it can use."""
    if not dali_installed():
        return 0
    try:
        return int(_module("nvidia.dali.backend_impl").GetCUDADeviceCount())
    except RuntimeError as error:  # a driver older than its CUDA
        warn_once(_log, f"DALI cannot use the GPU: {_first_line(error)}")
        return 0


class DaliDecoder:
    """One decoder for `device_id=None` (CPU) or a GPU's number. Pipelines are lent to one thread at a time; on a GPU each decodes
    `threads` clips at once."""

    def __init__(self, device_id: int | None = None, threads: int = GPU_THREADS) -> None:
        if not dali_installed():
            raise UnsupportedError("DALI is not installed", hint="pip install nvidia-dali-cuda130 (Linux only)")
        if device_id is not None and device_id >= gpu_count():
            raise UnsupportedError(f"DALI sees no GPU number {device_id}", hint="use device='cpu'")
        if device_id is not None and (why := nvdec.missing()) is not None:
            raise UnsupportedError(f"the GPU cannot decode video: {why}", hint="use decoder='pyav'")
        self.name = "dali_cpu" if device_id is None else "dali_gpu"
        self._device_id, self._threads = device_id, 1 if device_id is None else threads
        self._batch = 1 if device_id is None else GPU_BATCH
        self._idle: list[_Pipeline] = []
        self._lock = threading.Lock()

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        results: list[Decoded | HeadraceError] = []
        for start in range(0, len(requests), self._batch):
            results += self._decode_some(requests[start : start + self._batch])
        return results

    def close(self) -> None:
        with self._lock:
            self._idle.clear()

    def _decode_some(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        prepared = [self._prepare(request) for request in requests]
        good = [(number, feed) for number, (feed, _) in enumerate(prepared) if not isinstance(feed, HeadraceError)]
        frames: dict[int, torch.Tensor | HeadraceError] = {}
        if good:
            decoded = self._run_safely([feed for _, feed in good])
            frames = dict(zip((number for number, _ in good), decoded, strict=True))
        results = []
        for number, (feed, wanted) in enumerate(prepared):
            outcome = feed if isinstance(feed, HeadraceError) else frames[number]
            results.append(
                outcome if isinstance(outcome, HeadraceError) else _checked(outcome, wanted, requests[number])
            )
        return results

    def _prepare(self, request: Request) -> tuple[_Feed | HeadraceError, _Wanted]:
        try:
            with open_window(request) as window:
                if not window.stamped or len(window.packets) != len(window.times):
                    raise UnsupportedError("some packets show no frame, and DALI counts packets")
                if self._device_id is not None:
                    nvdec.check(window, request.info.codec)
                picks = window.picks
                # for a frame that is asked for again DALI would go back to the key frame
                return (mux(window), tuple(dict.fromkeys(picks))), (picks, window.pts)
        except HeadraceError as error:
            return error, ((), ())

    def _run_safely(self, feeds: list[_Feed]) -> list[torch.Tensor | HeadraceError]:
        try:
            return list(self._run(feeds))
        except (RuntimeError, MemoryError) as error:  # the latter also for memory of the GPU
            if len(feeds) == 1:
                kind = CapacityError if isinstance(error, MemoryError) else CorruptionError
                return [kind(f"DALI cannot decode it: {_first_line(error)}")]
            return [result for feed in feeds for result in self._run_safely([feed])]

    def _run(self, feeds: list[_Feed]) -> list[torch.Tensor]:
        with self._lock:
            pipeline = self._idle.pop() if self._idle else None
        pipeline = pipeline or _Pipeline(self._device_id, self._batch, self._threads)
        frames = pipeline.run(feeds)  # when it raises, the pipeline is not used again
        with self._lock:
            self._idle.append(pipeline)
        return frames


class _Pipeline:
    """A built DALI pipeline; one thread at a time."""

    def __init__(self, device_id: int | None, batch: int, threads: int) -> None:
        fn, types = _module("nvidia.dali.fn"), _module("nvidia.dali.types")

        @_module("nvidia.dali").pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=batch, num_threads=threads, device_id=device_id, exec_dynamic=True, prefetch_queue_depth=1
        )
        def clips() -> tuple[Any, Any]:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
            picks = fn.external_source(name="picks", dtype=types.INT32, ndim=1)
            uid = fn.external_source(name="uid", dtype=types.INT64, ndim=1)
            device = "cpu" if device_id is None else "mixed"
            # a frame that is not there shall be an error; DALI's default is a black picture
            return fn.decoders.video(encoded, device=device, frames=picks, affine=False, pad_mode="none"), uid

        self._pipe = clips()
        self._pipe.build()
        self._uids = itertools.count()

    def run(self, feeds: list[_Feed]) -> list[torch.Tensor]:
        uids = list(itertools.islice(self._uids, len(feeds)))
        self._pipe.feed_input("encoded", [np.frombuffer(data, np.uint8) for data, _ in feeds])
        self._pipe.feed_input("picks", [np.array(picks, np.int32) for _, picks in feeds])
        self._pipe.feed_input("uid", [np.array([uid], np.int64) for uid in uids])
        frames, came = self._pipe.run()
        if [int(np.asarray(came[i])[0]) for i in range(len(came))] != uids:
            raise RuntimeError("DALI returned the frames of another request")
        return copied(frames)


def copied(outputs: Any) -> list[torch.Tensor]:
    """DALI's outputs as tensors of our own. On a GPU the copies are done when this returns: DALI, which knows nothing of
    torch's streams, may put the next run's frames where these were as soon as nobody holds them."""
    found = [torch.from_dlpack(outputs[i]).clone() for i in range(len(outputs))]
    if found and found[0].is_cuda:
        torch.cuda.current_stream(found[0].device).synchronize()
    return found


def _checked(frames: torch.Tensor, wanted: _Wanted, request: Request) -> Decoded | HeadraceError:
    picks, pts = wanted
    places = {pick: place for place, pick in enumerate(dict.fromkeys(picks))}
    expected = (len(places), request.info.height, request.info.width, 3)
    if tuple(frames.shape) != expected:
        return CorruptionError(f"DALI decoded frames of shape {tuple(frames.shape)}, the index says {expected}")
    if len(places) != len(picks):
        frames = frames[[places[pick] for pick in picks]]
    try:
        return Decoded(resize.apply(frames, request.fit), pts)
    except torch.OutOfMemoryError as error:
        return CapacityError(f"the GPU cannot scale it: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """DALI's messages carry native stack traces; the reason stands behind the last colon before them."""
    text = str(error).split("Stacktrace")[0].split("C++ context")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
