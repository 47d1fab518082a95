"""Utilisation of the card's engines while something runs, as `nvidia-smi dmon` reports it; nothing is set.

Invariant: only reads. Failure behaviour: without `nvidia-smi`, or when its table cannot be read, there are no samples.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Self


class Dmon:
    """`with Dmon() as watch: …`; afterwards `watch.samples["dec"]` has per cent, one a second; also sm, mem, enc."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "dmon", "-s", "u", "-d", "1"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text, _ = self._process.communicate(timeout=30)
        self.samples = parse(text)


def parse(text: str) -> dict[str, list[float]]:
    """Columns by name; "-" and anything else that is no number is left out."""
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
