"""Utilisation of the card's engines while something runs, read from the driver's own library; nothing is set.

`libnvidia-ml.so.1` is asked ten times a second (`nvmlDeviceGetDecoderUtilization`, `nvmlDeviceGetUtilizationRates`: NVML API
reference, "Device Queries"); where it cannot be loaded, `nvidia-smi dmon` is, once a second.
Invariant: only reads. The card is the one with this PCI address, as CUDA may number cards otherwise. Failure behaviour: without
either, or for a card that does not tell (a MIG slice does not), there are no samples.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from typing import Any, Self

_EVERY = 0.1


class Dmon:
    """`with Dmon(address) as watch: …`; afterwards `watch.samples["dec"]` has per cent, and "sm", "mem".

    `address`: as in "00000000:1B:00.0"; None for the first card.
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
            self.samples = parse(text)

    def _start_dmon(self) -> None:
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "dmon", "-s", "u", "-d", "1"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def _watch(self, library: Any, card: ctypes.c_void_p) -> None:
        while not self._stop.wait(_EVERY):
            for name, value in ask(library, card).items():
                self.samples.setdefault(name, []).append(value)


def _card(library: Any, address: str | None) -> ctypes.c_void_p:
    """The handle of the card; `OSError` where there is none."""
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


def ask(library: Any, card: ctypes.c_void_p) -> dict[str, float]:
    """Per cent of the decoders, the multiprocessors and the memory in use, as far as the card tells."""
    found: dict[str, float] = {}
    busy, period, rates = ctypes.c_uint(), ctypes.c_uint(), _Rates()
    if not library.nvmlDeviceGetDecoderUtilization(card, ctypes.byref(busy), ctypes.byref(period)):
        found["dec"] = float(busy.value)
    if not library.nvmlDeviceGetUtilizationRates(card, ctypes.byref(rates)):
        found |= {"sm": float(rates.gpu), "mem": float(rates.memory)}
    return found


def parse(text: str) -> dict[str, list[float]]:
    """Columns of `nvidia-smi dmon` by name; "-" and anything else that is no number is left out."""
    names: list[str] = []
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.lstrip("# ").split()
            names = words if "gpu" in words else names
            continue
        for name, value in zip(names, line.split(), strict=False):
            try:
                found.setdefault(name, []).append(float(value))
            except ValueError:
                continue
    return found
