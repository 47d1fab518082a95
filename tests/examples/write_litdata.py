"""Writes a compressed data set of litData with arrays, recordings and bytes: `python write_litdata.py FOLDER`."""

from __future__ import annotations

import io
import sys
import wave
from typing import Any

import numpy as np
import torch


def recording(number: int) -> bytes:
    with wave.open(out := io.BytesIO(), "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(8000)
        file.writeframes(np.full(400, number, np.int16).tobytes())
    return out.getvalue()


def sample(number: int) -> dict[str, Any]:
    import litdata

    found = {"matrix": torch.full((2, 3), float(number)), "vector": np.arange(number + 1), "raw": bytes([number] * 5)}
    sound = litdata.Audio(bytes=recording(number))
    return {**found, "sound": sound, "label": number, "caption": f"number {number}"}


if __name__ == "__main__":
    import litdata

    options = {"output_dir": sys.argv[1], "chunk_size": 3, "num_workers": 1, "compression": "zstd"}
    litdata.optimize(fn=sample, inputs=list(range(8)), **options)
