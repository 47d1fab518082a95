"""How small the changes of bf16 weights become, by the forms that note 0047 compares: `python -m tests.support.weight_updates`.

The weights are random. Either a share of them changes by one or two units in the last place, or an fp32 master takes AdamW
steps with random gradients, of which the tenth is measured.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import zstandard

CHUNK = 2 << 20
U16 = npt.NDArray[np.uint16]


def _packed(*parts: npt.NDArray[np.generic]) -> int:
    return len(zstandard.ZstdCompressor(level=3).compress(b"".join(part.tobytes() for part in parts)))


def xor_planes(difference: U16) -> int:
    data = difference.view(np.uint8)
    return _packed(data[0::2], data[1::2])


def bitmap(difference: U16) -> int:
    values = difference[difference != 0].view(np.uint8)
    return _packed(np.packbits(difference != 0), values[0::2], values[1::2])


def positions(difference: U16) -> int:
    at = np.flatnonzero(difference != 0)
    distances, values = np.diff(at, prepend=0).astype(np.uint32).view(np.uint8), difference[at].view(np.uint8)
    return _packed(*(distances[n::4] for n in range(4)), values[0::2], values[1::2])


FORMS: dict[str, Callable[[U16], int]] = {
    "XOR planes": xor_planes,
    "bitmap and XOR": bitmap,
    "positions and XOR": positions,
}


def _bits(tensor: torch.Tensor) -> U16:
    bits: U16 = tensor.bfloat16().view(torch.int16).numpy().view(np.uint16).copy()
    return bits


def _report(what: str, old: U16, new: U16) -> None:
    difference = old ^ new
    pieces = [difference[at : at + CHUNK] for at in range(0, len(difference), CHUNK)]
    sizes = {name: sum(form(piece) for piece in pieces) / difference.nbytes for name, form in FORMS.items()}
    shown = ", ".join(f"{name} {size:.2%}" for name, size in sizes.items())
    print(f"{what}: {np.mean(difference != 0):.1%} of the elements changed; {shown}")


def main() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    old = _bits(torch.randn(16 << 20) * 0.02)
    new = old.copy()
    changed = rng.random(len(old)) < 0.02
    new[changed] += rng.integers(1, 3, changed.sum()).astype(np.uint16)
    _report("2 % by one or two units", old, new)
    for rate in (1e-6, 1e-5, 3e-4):
        weights = torch.nn.Parameter(torch.randn(8 << 20) * 0.02)
        optimizer = torch.optim.AdamW([weights], lr=rate)
        for _ in range(10):
            old = _bits(weights.detach())
            weights.grad = torch.randn_like(weights)
            optimizer.step()
        _report(f"AdamW at {rate:g}", old, _bits(weights.detach()))


if __name__ == "__main__":
    main()
