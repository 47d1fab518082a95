"""Which decoder a clip gets: one rule, logged once, the same on every rank.

Purpose: hide the back ends behind one `Decoder`.
Invariants: DALI only gets streams that it decodes to PyAV's pixels: 8-bit streams without transparency whose packets
are frames. On the CPU it gives PyAV's bits but uses more CPU time, so it decodes there only on request. PyAV decodes
every clip that DALI refuses, so whether a sample counts as damaged does not depend on what is installed.
Failure behaviour: that of the contract. Without DALI or without a GPU the rule selects PyAV, and `explain` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.dataio.shards.sample import Sample, VideoInfo
from headrace.loaders.decode import dali
from headrace.loaders.decode.base import Color, Decoded, Decoder, Request
from headrace.loaders.decode.dali import DaliDecoder, dali_installed, gpu_count
from headrace.loaders.decode.pyav import PyAVDecoder, is_jpeg

Kind = Literal["pyav", "dali_cpu", "dali_gpu"]
Backend = Literal["auto", "dali", "pyav"]
"""The caller's choice: the rule; the rule, with DALI also on the CPU; PyAV alone."""

CPU_CODECS = frozenset(["vp8", "vp9", "mjpeg"])
CPU_FORMATS = frozenset(["yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p"])
RULE = (
    "video decoders: on device='cuda' with a GPU, DALI (NVDEC) for 8-bit 4:2:0 "
    + "/".join(sorted(dali.NVDEC_CODECS))
    + "; with decoder='dali' DALI on the CPU for 8-bit "
    + "/".join(sorted(CPU_CODECS))
    + "; JPEG pictures libjpeg-turbo; else, with decoder='pyav', for color other than bt601, for other pictures, and for "
    + "whatever DALI refuses, PyAV"
)

_log = get_logger(__name__)


def choose(info: VideoInfo, *, gpu: bool, color: Color = "bt601", asked: Backend = "auto") -> Kind:
    """The decoder for a stream, if it is installed. A pure function of the index entry and the arguments."""
    if asked == "pyav" or color != "bt601" or info.ext in IMAGE_EXTENSIONS:
        return "pyav"
    if gpu and dali.nvdec_supports(info):
        return "dali_gpu"
    if asked == "dali" and info.codec in CPU_CODECS and info.pixel_format in CPU_FORMATS:
        return "dali_cpu"
    return "pyav"


def decodes_on(device_id: int) -> bool:
    """Whether DALI sees this GPU, and the driver's video library is present. For a GPU without that library, one log
    line gives the reason."""
    if gpu_count() <= device_id:
        return False
    if (why := dali.nvdec_missing()) is not None:
        warn_once(_log, f"no video is decoded on the GPU, but by PyAV: {why}")
    return why is None


def explain(sample: Sample, color: Color, device: str, asked: Backend = "auto") -> str:
    """Which stream of a sample is decoded, by which decoder and why, in a few lines of plain text."""
    info = sample.video
    if info is None:
        return f"sample {sample.key!r} holds no video"
    gpu = device == "cuda" and decodes_on(0)
    kind = choose(info, gpu=gpu, color=color, asked=asked)
    if kind != "pyav" and not dali_installed():
        kind = "pyav"
    ends = " (a picture: one frame)" if info.ext in IMAGE_EXTENSIONS else ""
    return "\n".join(
        [
            f"sample {sample.key!r}: stream {info.stream} of its .{info.ext}, {info.codec} {info.width}x{info.height} "
            f"{info.pixel_format}{ends}",
            "stream: the largest; of equal ones the one flagged as default, then the first",
            f"decoder: {'libjpeg-turbo' if is_jpeg(info) else kind}",
            f"by the rule: {RULE}",
            f"colour: {color}; rotation in the file: {info.rotation} degrees",
        ]
    )


class AutoDecoder:
    """Decodes each request by the rule. DALI is imported when the first clip needs it."""

    name = "auto"

    def __init__(self, device: str = "cpu", device_id: int = 0, asked: Backend = "auto") -> None:
        self._asked: Backend = asked
        self._gpu = device == "cuda" and decodes_on(device_id)
        self._device_id = device_id
        self._pyav = PyAVDecoder()
        _log.info(RULE)
        self._dali: dict[Kind, Decoder] = {}
        self._told = set[str]()
        self._lock = threading.Lock()

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        results: list[Decoded | None] = [None] * len(requests)
        refused = dict[int, HeadraceError]()
        kinds = [self._kind(request) for request in requests]
        for kind in sorted(set(kinds) - {"pyav"}):
            numbers = [number for number, other in enumerate(kinds) if other == kind]
            for number, result in zip(numbers, self._of(kind).decode([requests[n] for n in numbers]), strict=True):
                if isinstance(result, HeadraceError):
                    refused[number] = result
                else:
                    results[number] = result
        left = [number for number, result in enumerate(results) if result is None]
        judged = iter(self._pyav.decode([requests[n] for n in left]))
        found = [next(judged) if result is None else result for result in results]
        for number, error in refused.items():
            if isinstance(found[number], Decoded):
                self._tell(requests[number].info.codec, error)
        return found

    def close(self) -> None:
        for decoder in self._dali.values():
            decoder.close()

    def _tell(self, codec: str, error: HeadraceError) -> None:
        """Warn once per codec that PyAV decodes clips that DALI refuses, which takes CPU time that the user wanted to
        save."""
        if codec not in self._told:
            self._told.add(codec)
            _log.warning("PyAV decodes some %s that DALI refuses: %s", codec, error)

    def _kind(self, request: Request) -> Kind:
        kind = choose(request.info, gpu=self._gpu, color=request.color, asked=self._asked)
        return kind if kind == "pyav" or dali_installed() else "pyav"

    def _of(self, kind: Kind) -> Decoder:
        with self._lock:
            if kind not in self._dali:
                self._dali[kind] = DaliDecoder(self._device_id if kind == "dali_gpu" else None)
            return self._dali[kind]
