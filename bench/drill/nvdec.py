"""The drill's part `nvdec`: decoding on the card.

It compares the pixels of NVDEC, through DALI `mixed`, with those of the CPU. It measures frames per second by
codec and size. It encodes the clips itself (libx264, libx265, libvpx-vp9, libsvtav1). The loader's own decoders decode
them from the same bytes. The difference is over all frames of a clip. Rates are those of several concurrent threads, as
in the loader. Their frames are compared with those of one thread alone. For a stream that
`headrace.loaders.decode.dali` does not give to the GPU, the part has a note.

`UtilizationSampler` samples the utilisation of one card. It only reads.

Failure behaviour: a codec that fails is an error of its decoder, and the others continue. Without NVML and nvidia-smi
there are no samples of the utilisation.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from headrace.bench.drill.result import PartResult, rates
from headrace.dataio.core.errors import UnsupportedError

_CODECS = {
    "h264": ("libx264", "mp4"),
    "hevc": ("libx265", "mp4"),
    "vp9": ("libvpx-vp9", "webm"),
    "av1": ("libsvtav1", "mkv"),
}
_FRAMES = 48
_CLIPS = {"DALI, GPU": 12, "DALI, CPU": 4, "PyAV": 8}
"""The number of clips that each decoder decodes concurrently."""
_THREADS = (1, 2, 8)
"""Threads of a pipeline, in addition to those that the loader uses. Only H.264 is measured with them."""
_MOST_OFF, _OFTEN = 2, 0.05
"""The maximum difference of a value, and the maximum share of values that differ by more than one.

DALI converts colours on the card with other rounding than libswscale: on an H200, 2.5 % of the values differ by two.
"""
_SECONDS = 3.0
"""Seconds for each codec, size and decoder on a GPU machine: enough for the driver's averages of the decoder
engines."""


def nvdec(gpu: bool) -> PartResult:
    """Measure all codecs at 360p and, with a GPU, at 1080p."""
    part = PartResult("nvdec", "Decoding: NVDEC compared with the CPU", against="PyAV")
    sizes = ((640, 360), (1920, 1080)) if gpu else ((640, 360),)
    part.settings = {"frames": _FRAMES, "clips_at_once": _CLIPS, "sizes": [f"{w}x{h}" for w, h in sizes]}
    with tempfile.TemporaryDirectory(prefix="mrb-") as scratch:
        for codec, (encoder, suffix) in _CODECS.items():
            for width, height in sizes:
                path = Path(scratch) / f"{codec}-{height}.{suffix}"
                try:
                    make(path, encoder, width, height)
                    _measure(part, codec, height, path, gpu)
                except Exception as error:
                    part.fail("DALI, GPU" if gpu else "PyAV", f"{codec} {height}p: {type(error).__name__}: {error}")
    if not gpu:
        part.notes.append("no GPU: only the CPU's rates; DALI on the CPU decodes VP9 of these codecs")
    return part


def make(path: Path, encoder: str, width: int, height: int, options: dict[str, str] | None = None) -> None:
    """Write a clip of `_FRAMES` frames that all differ."""
    import numpy as np

    from headrace.bench.core.data import write_video

    row, column = np.mgrid[0:height, 0:width]

    def picture(number: int) -> np.ndarray:
        planes = [(row + column * 2 + number * 5) % 256, (column + number * 3) % 256, (row * 2 - number * 4) % 256]
        return np.stack(planes, -1).astype(np.uint8)

    options = options or ({"x265-params": "log-level=error"} if encoder == "libx265" else {})
    write_video(path, encoder, map(picture, range(_FRAMES)), options=options)


def request_for(path: Path) -> Any:
    from headrace.dataio.shards.media.probe import probe
    from headrace.loaders.clip import Wanted
    from headrace.loaders.decode.base import Request

    info: Any = probe(path).video
    frames = Wanted("index", tuple(range(min(_FRAMES, info.frames))), info.key_frames[0])
    return Request(memoryview(path.read_bytes()), info, frames)


def _decoders(codec: str, gpu: bool) -> Iterator[tuple[str, Any]]:
    """Yield PyAV, which is the reference, and then the others.

    Each is created only after the previous one was measured. So a decoder that cannot be created does not affect the
    reference.
    """
    from headrace.loaders.decode.dali import DaliDecoder, dali_installed
    from headrace.loaders.decode.pyav import PyAVDecoder

    yield "PyAV", PyAVDecoder()
    if gpu:
        yield "DALI, GPU", DaliDecoder(0)
        for threads in _THREADS if codec == "h264" else ():
            yield f"DALI, GPU, {threads} threads", DaliDecoder(0, threads)
    elif codec == "vp9" and dali_installed():
        yield "DALI, CPU", DaliDecoder()


def _measure(part: PartResult, codec: str, height: int, path: Path, gpu: bool) -> None:
    name, request = f"{codec}_{height}", request_for(path)
    part.metric(f"{name}_rate", f"{codec} {height}p, frames/s", "1/s", "higher")
    part.metric(f"{name}_off", f"{codec} {height}p, largest difference of a pixel to PyAV", "1", goal=_MOST_OFF)
    part.metric(f"{name}_mean", f"{codec} {height}p, mean difference of a pixel to PyAV", "1")
    part.metric(f"{name}_dec", f"{codec} {height}p, decoder engines in use", "%", "higher")
    reference: Any = None
    for decoder_name, decoder in _decoders(codec, gpu):
        try:
            frames = _decode_one(decoder, request)
        except UnsupportedError as error:
            part.notes.append(f"{codec} {height}p: PyAV decodes it in place of {decoder_name}: {error}")
            return
        reference = frames if reference is None else reference
        _compare(part, decoder_name, name, frames, reference)
        count = _CLIPS[decoder_name.rpartition(",")[0] if "threads" in decoder_name else decoder_name]
        with UtilizationSampler(_address() if gpu else None) as watch:
            frame_rates = rates(functools.partial(_many, decoder, request, count), _SECONDS * gpu)
        part.add(decoder_name, f"{name}_rate", *frame_rates)
        if "GPU" in decoder_name and watch.samples.get("dec"):
            part.add(decoder_name, f"{name}_dec", *watch.samples["dec"])
        if not all(bool((one.cpu() == frames).all()) for one in _at_once(decoder, request, count)):
            part.fail(decoder_name, f"{codec} {height}p: several threads at once got other pixels than one alone")
        decoder.close()


def _compare(part: PartResult, decoder: str, name: str, frames: Any, reference: Any) -> None:
    difference = (frames.int() - reference.int()).abs()
    part.add(decoder, f"{name}_off", float(difference.max()))
    part.add(decoder, f"{name}_mean", float(difference.float().mean()))
    often = float((difference > 1).float().mean())
    if difference.max() > _MOST_OFF or often > _OFTEN:
        part.fail(decoder, f"{name}: pixels are off by up to {int(difference.max())}, {often:.2%} by more than one")


def _decode_one(decoder: Any, request: Any) -> Any:
    return _frames(decoder.decode([request])[0]).cpu()


def _at_once(decoder: Any, request: Any, count: int) -> list[Any]:
    """Decode the clip `count` times, by four threads, and return the frames of each."""

    def some(share: list[Any]) -> list[Any]:
        return [_frames(found) for found in decoder.decode(share)]

    requests = [request] * count
    with ThreadPoolExecutor(4) as pool:
        return [frames for share in pool.map(some, (requests[at::4] for at in range(4))) for frames in share]


def _frames(decoded: Any) -> Any:
    if isinstance(decoded, Exception):
        raise decoded
    return decoded.frames


def _many(decoder: Any, request: Any, count: int) -> float:
    """Decode the clip `count` times, and return the number of frames."""
    import torch

    frames = sum(map(len, _at_once(decoder, request, count)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return frames


def _address() -> str | None:
    """Return the PCI address of CUDA's card 0, as NVML writes it."""
    import torch

    about: Any = torch.cuda.get_device_properties(0)
    try:
        return f"{about.pci_domain_id:08X}:{about.pci_bus_id:02X}:{about.pci_device_id:02X}.0"
    except AttributeError:
        return None


_EVERY = 0.1


class UtilizationSampler:
    """Samples the utilisation of a card within `with UtilizationSampler(address) as watch: …`.

    It asks NVML ten times a second (`nvmlDeviceGetDecoderUtilization`, `nvmlDeviceGetUtilizationRates`) or, without
    NVML, runs `nvidia-smi dmon` once a second. Afterwards `watch.samples` has the per cent of "dec", "sm" and "mem".

    Args:
        address: The PCI address of the card, such as "00000000:1B:00.0". None means the first card.
    """

    def __init__(self, address: str | None = None) -> None:
        self.samples: dict[str, list[float]] = {}
        self._address = address
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            library: Any = ctypes.CDLL("libnvidia-ml.so.1")
            card = _card(library, self._address)
        except OSError:
            self._start_dmon()
            return self
        self._thread = threading.Thread(target=self._watch, args=(library, card), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)
        if self._process is not None:
            self._process.terminate()
            text, _ = self._process.communicate(timeout=30)
            self.samples = parse_dmon(text)

    def _start_dmon(self) -> None:
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "dmon", "-s", "u", "-d", "1", "-i", self._address or "0"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def _watch(self, library: Any, card: ctypes.c_void_p) -> None:
        while not self._stop.wait(_EVERY):
            for name, value in read_utilization(library, card).items():
                self.samples.setdefault(name, []).append(value)


def _card(library: Any, address: str | None) -> ctypes.c_void_p:
    """Return the handle of the card, or raise `OSError` if there is none."""
    card = ctypes.c_void_p()
    failed = library.nvmlInit_v2()
    if not failed and address:
        failed = library.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(card))
    elif not failed:
        failed = library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card))
    if failed:
        raise OSError(f"NVML error {failed}")
    return card


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read_utilization(library: Any, card: ctypes.c_void_p) -> dict[str, float]:
    """Return the utilisation of decoders, multiprocessors and memory in per cent, as far as the card reports it."""
    utilization: dict[str, float] = {}
    busy, period, rates = ctypes.c_uint(), ctypes.c_uint(), _Rates()
    if not library.nvmlDeviceGetDecoderUtilization(card, ctypes.byref(busy), ctypes.byref(period)):
        utilization["dec"] = float(busy.value)
    if not library.nvmlDeviceGetUtilizationRates(card, ctypes.byref(rates)):
        utilization |= {"sm": float(rates.gpu), "mem": float(rates.memory)}
    return utilization


def parse_dmon(text: str) -> dict[str, list[float]]:
    """Return the columns of `nvidia-smi dmon` by name, without "-" and other values that are not numbers."""
    names: list[str] = []
    columns: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.lstrip("# ").split()
            names = words if "gpu" in words else names
            continue
        for name, value in zip(names, line.split(), strict=False):
            try:
                columns.setdefault(name, []).append(float(value))
            except ValueError:
                continue
    return columns
