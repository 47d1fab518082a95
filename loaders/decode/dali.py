"""Decoding with NVIDIA DALI: H.264, HEVC, VP9 and AV1 on a GPU (NVDEC); VP8, VP9 and MJPEG on the CPU on request.

Purpose: the fast path, under the same contract as PyAV's, for the streams that DALI decodes correctly. DALI expects one
decoded frame per packet, identifies frames by time stamps in whole milliseconds, and converts pixels in blocks of two
by two. For other streams it would return adjacent frames or misplaced pixels without an error, so they are rejected.

Invariants:
- DALI never gets a whole file, only packets that `trim` selected and checked. So it cannot run out of data and pad with
  zeros.
- Every request has a number that passes through the graph, and its frames must come back with the same number.
- After an error the pipeline is discarded (building one takes milliseconds). Each request of the batch then runs again
  in a new one. That identifies the bad request, and the others are decoded.
- The checks are pure. `nvdec_missing` searches for the driver's library once.
- DALI keeps input buffers by reference (`no_copy`), so this module keeps them until the outputs are copied.

Failure behaviour: that of `headrace.loaders.decode.base`. The constructor raises `UnsupportedError` if DALI is not
installed or the GPU is missing. `check_nvdec` raises `UnsupportedError` with the reason, also for packets that it
cannot parse.

Sources: DALI's `FramesDecoderBase`, `FramesDecoderGpu` and `VideoColorSpaceConversion`; the specifications of AV1 (5.3,
5.9.2), HEVC (8.1.3: pictures that lead an IRAP picture) and VP9 (6.2, annex B); NVIDIA's Video Codec SDK, "NVDEC
capabilities".
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.media import bitstream
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.decode import resize
from headrace.loaders.decode.base import GPU_BATCH, Color, Decoded, Request, whole_clip_bytes
from headrace.loaders.decode.registry import register_decoder
from headrace.loaders.decode.trim import Window, mux, open_window

GPU_THREADS = 4
"""Number of clips of a run that are decoded in parallel. Each DALI thread keeps one of the GPU's decoders (up to seven)
busy, and waits for it."""
_Feed = tuple[bytes, tuple[int, ...]]
_PickedFrames = tuple[tuple[int, ...], tuple[int, ...]]
"""The indices of a clip's frames in its window, and their time stamps."""

_log = get_logger(__name__)


def _module(name: str) -> Any:
    """Import a module of DALI on first use, since the import takes most of a second. DALI's types are incomplete."""
    return importlib.import_module(name)


@functools.cache
def dali_installed() -> bool:
    """Whether DALI can be imported. It exists for Linux only."""
    try:
        _module("nvidia.dali")
    except ImportError:
        return False
    return True


@functools.cache
def gpu_count() -> int:
    """The number of GPUs that DALI detects; 0 without DALI or without a usable driver."""
    if not dali_installed():
        return 0
    try:
        return int(_module("nvidia.dali.backend_impl").GetCUDADeviceCount())
    except RuntimeError as error:  # the driver is older than DALI's CUDA
        warn_once(_log, f"DALI cannot use the GPU: {_first_line(error)}", "node")
        return 0


class DaliDecoder:
    """A decoder on the CPU (`device_id=None`) or on the GPU with this index.

    Each pipeline is used by one thread at a time. On a GPU, a pipeline decodes `threads` clips in parallel.
    """

    def __init__(self, device_id: int | None = None, threads: int = GPU_THREADS) -> None:
        reason = cpu_missing() if device_id is None else gpu_missing(device_id)
        if reason is not None:
            raise UnsupportedError(f"DALI cannot decode here: {reason}", hint="use decoder='pyav'")
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

    def clip_bytes(self, info: VideoInfo, frames: int, size: tuple[int, int] | None, color: Color) -> int:
        return whole_clip_bytes(info, frames)

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
        for number, (feed, picked) in enumerate(prepared):
            outcome = feed if isinstance(feed, HeadraceError) else frames[number]
            results.append(
                outcome if isinstance(outcome, HeadraceError) else _checked(outcome, picked, requests[number])
            )
        return results

    def _prepare(self, request: Request) -> tuple[_Feed | HeadraceError, _PickedFrames]:
        try:
            with open_window(request) as window:
                if not window.stamped or len(window.packets) != len(window.times):
                    raise UnsupportedError("some packets show no frame, and DALI counts packets")
                if self._device_id is not None:
                    check_nvdec(window, request.info.codec)
                picks = window.picks
                # DALI would return to the key frame for a repeated frame
                return (mux(window), tuple(dict.fromkeys(picks))), (picks, window.pts)
        except HeadraceError as error:
            return error, ((), ())

    def _run_safely(self, feeds: list[_Feed]) -> list[torch.Tensor | HeadraceError]:
        try:
            return list(self._run(feeds))
        except (RuntimeError, MemoryError) as error:  # MemoryError also reports exhausted GPU memory
            if len(feeds) == 1:
                kind = CapacityError if isinstance(error, MemoryError) else CorruptionError
                return [kind(f"DALI cannot decode it: {_first_line(error)}")]
            return [result for feed in feeds for result in self._run_safely([feed])]

    def _run(self, feeds: list[_Feed]) -> list[torch.Tensor]:
        with self._lock:
            pipeline = self._idle.pop() if self._idle else None
        pipeline = pipeline or _Pipeline(self._device_id, self._batch, self._threads)
        frames = pipeline.run(feeds)  # if it raises, the pipeline is not used again
        with self._lock:
            self._idle.append(pipeline)
        return frames


class _Pipeline:
    """A built DALI pipeline. Not safe to share between threads."""

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
            # a missing frame must be an error; DALI's default is a black frame
            return fn.decoders.video(encoded, device=device, frames=picks, affine=False, pad_mode="none"), uid

        self._pipe = clips()
        self._pipe.build()
        self._uids = itertools.count()

    def run(self, feeds: list[_Feed]) -> list[torch.Tensor]:
        uids = list(itertools.islice(self._uids, len(feeds)))
        self._pipe.feed_input("encoded", [np.frombuffer(data, np.uint8) for data, _ in feeds])
        self._pipe.feed_input("picks", [np.array(picks, np.int32) for _, picks in feeds])
        self._pipe.feed_input("uid", [np.array([uid], np.int64) for uid in uids])
        frames, returned = self._pipe.run()
        if [int(np.asarray(returned[i])[0]) for i in range(len(returned))] != uids:
            raise RuntimeError("DALI returned the frames of another request")
        return copied(frames)


def copied(outputs: Any) -> list[torch.Tensor]:
    """Copy DALI's outputs into tensors. On a GPU this returns after the copies have finished.

    DALI does not synchronise with torch's streams. So the next run may overwrite its output buffers as soon as they are
    released.
    """
    tensors = [torch.from_dlpack(outputs[i]).clone() for i in range(len(outputs))]
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return tensors


def _checked(frames: torch.Tensor, picked: _PickedFrames, request: Request) -> Decoded | HeadraceError:
    picks, pts = picked
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
    """The reason in a DALI error: the last line before the native stack trace."""
    text = str(error).split("Stacktrace")[0].split("C++ context")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


NVDEC_CODECS = frozenset(["h264", "hevc", "vp9", "av1"])
NVDEC_FORMATS = frozenset(["yuv420p"])
LEAST_SIDE = 144
"""The minimum of HEVC. The other codecs have lower minimums, but a CPU decodes such small frames quickly."""
_MOST_SIDE = {"h264": 4096}
_MOST = 8192
_LIBRARY = "libnvcuvid.so.1"
_LEAP = 11
"""DALI searches for a key frame to skip to if the next requested frame is more than this many frames ahead."""
_PROGRESSIVE = 1
"""libav's `AV_FIELD_PROGRESSIVE`. 0 is unknown; all higher values are kinds of interlacing."""
_FRAME_HEADER = 3
"""The type of AV1 units that can show a previously decoded frame."""


@functools.cache
def nvdec_missing() -> str | None:
    """Why no GPU of this machine can decode video, or None. Containers often include CUDA but not the video driver."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return f"{error} (a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility,video)"
    return None


def nvdec_supports(info: VideoInfo) -> bool:
    """Whether the GPU decodes streams of this format and size, according to the index."""
    sides = info.width, info.height
    return (
        info.codec in NVDEC_CODECS
        and info.pixel_format in NVDEC_FORMATS
        and info.format != "avi"
        # for VP9 and AV1, whose pixel format does not show it, DALI takes the colour range from the driver
        and (info.color is None or info.color.range != "pc")
        and not any(side % 2 for side in sides)
        and min(sides) >= LEAST_SIDE
        and max(sides) <= _MOST_SIDE.get(info.codec, _MOST)
    )


def check_nvdec(window: Window, codec: str) -> None:
    """Raise `UnsupportedError` for packets that DALI would decode to wrong frames."""
    if getattr(window.stream.codec_context, "field_order", 0) > _PROGRESSIVE:
        raise UnsupportedError("the stream is interlaced, and its fields may be pictures of their own")
    units = bitstream.length_size(codec, window.stream.codec_context.extradata)
    if codec == "h264" and not bitstream.is_idr(memoryview(window.packets[0]), units):
        raise UnsupportedError("the clip starts at a picture that is not an instantaneous refresh")
    base = window.stream.time_base
    if base is None or any((after - before) * base * 1000 < 1 for before, after in pairwise(window.times)):
        raise UnsupportedError("frames follow each other within a millisecond")
    if codec == "hevc" and _leaps(window.picks) and _is_open(window):
        raise UnsupportedError(
            "DALI would skip to a key frame after which pictures are shown that need pictures before it"
        )
    if codec in _REPEATS and any(_REPEATS[codec](bytes(packet)) for packet in window.packets):
        raise UnsupportedError("some packets show a picture that was decoded before, and DALI counts those it decodes")


def _leaps(picks: Sequence[int]) -> bool:
    """Whether DALI would skip frames on its way to a requested one, if there is a key frame to skip to."""
    return any(pick - before > _LEAP for before, pick in pairwise((-1, *picks)))


def _is_open(window: Window) -> bool:
    """Whether frames that are stored after a key frame, other than the first, are shown before it.

    A decoder that begins at that key frame may drop them. DALI counts packets, so it would assign their time stamps to
    later frames.
    """
    key: int | None = None
    for packet in window.packets[1:]:
        if packet.pts is not None and key is not None and packet.pts < key:
            return True
        key = packet.pts if packet.is_keyframe else key
    return False


def _vp9_repeats(packet: bytes) -> bool:
    """Whether one of the packet's frames only repeats an older frame.

    This is valid for profile 0, the only profile with 8-bit 4:2:0.
    """
    return any(not frame or bool(frame[0] & 0x08) for frame in _vp9_frames(packet))


def _vp9_frames(packet: bytes) -> Iterator[bytes]:
    """The frames of a superframe, or the packet itself."""
    marker = packet[-1]
    bytes_each, count = ((marker >> 3) & 3) + 1, (marker & 7) + 1
    index = packet[-(2 + bytes_each * count) :]
    if marker & 0xE0 != 0xC0 or index[0] != marker:
        yield packet
        return
    at = 0
    for number in range(count):
        size = int.from_bytes(index[1 + number * bytes_each :][:bytes_each], "little")
        yield packet[at : at + size]
        at += size


def _av1_repeats(packet: bytes) -> bool:
    """Whether one of the packet's frame headers shows an older frame. Units that contain whole frames cannot."""
    return any(kind == _FRAME_HEADER and (not unit or bool(unit[0] & 0x80)) for kind, unit in _av1_units(packet))


def _av1_units(packet: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield types and payloads. For a truncated unit, the payload is the bytes that exist."""
    at = 0
    while at < len(packet):
        head = packet[at]
        at += 2 if head & 4 else 1
        size = len(packet) - at
        if head & 2:
            size, at = _leb128(packet, at)
        yield (head >> 3) & 0xF, packet[at : at + size]
        at += size


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    """The number that is encoded at `at`, and where its encoding ends. The encoding has at most eight bytes."""
    value = 0
    for place, byte in enumerate(data[at : at + 8]):
        value |= (byte & 0x7F) << (7 * place)
        if not byte & 0x80:
            return value, at + place + 1
    raise UnsupportedError("a unit of the AV1 stream has no length")


_REPEATS = {"vp9": _vp9_repeats, "av1": _av1_repeats}


# --- the entries of the registry

CPU_CODECS = frozenset(["vp8", "vp9", "mjpeg"])
CPU_FORMATS = frozenset(["yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p"])


def cpu_missing(device_id: int = 0) -> str | None:
    """Why DALI cannot decode on the CPU, or None."""
    return None if dali_installed() else "DALI is not installed (pip install 'headrace[dali]', Linux only)"


def gpu_missing(device_id: int) -> str | None:
    """Why DALI cannot decode on this GPU, or None."""
    if (reason := cpu_missing()) is not None:
        return reason
    if device_id >= gpu_count():
        return f"DALI sees no GPU number {device_id}"
    return nvdec_missing()


def cpu_supports(info: VideoInfo) -> bool:
    """Whether DALI on the CPU decodes streams of this format to the pixels of PyAV."""
    return info.codec in CPU_CODECS and info.pixel_format in CPU_FORMATS


def _is_video(info: VideoInfo, color: Color) -> bool:
    return color == "bt601" and info.format not in IMAGE_EXTENSIONS


register_decoder(
    "dali_gpu",
    DaliDecoder,
    reads=lambda info, color: _is_video(info, color) and nvdec_supports(info),
    missing=gpu_missing,
    device="cuda",
    option="dali",
    automatic=True,
    priority=20,
    rule="8-bit 4:2:0 " + "/".join(sorted(NVDEC_CODECS)) + " in bt601, by NVDEC",
)
register_decoder(  # not automatic: it returns the same pixels as PyAV but uses more CPU time
    "dali_cpu",
    lambda device_id: DaliDecoder(),
    reads=lambda info, color: _is_video(info, color) and cpu_supports(info),
    missing=cpu_missing,
    option="dali",
    priority=10,
    rule="8-bit " + "/".join(sorted(CPU_CODECS)) + " in bt601",
)
