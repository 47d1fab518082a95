"""A large state that takes little space on disk, and its export and import: `exchange_state.py PART FOLDER FORMAT`.

Prints the peak resident memory in MiB of the part, and what this process needed before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from headrace.checkpoint import Checkpointer, export, import_checkpoint

_TENSORS, _SIDE = 4, 1 << 12


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def make(folder: str) -> None:
    """512 MiB in tensors of 64 and 256 MiB. All but two are zero, so the repository holds little."""
    torch.manual_seed(0)
    state = {f"w{i}": torch.zeros(_SIDE, _SIDE) for i in range(_TENSORS)} | {"large": torch.zeros(4 * _SIDE, _SIDE)}
    state["w0"].normal_()
    state["large"][::1000].normal_()
    with Checkpointer(f"{folder}/r", run="exp", sidecar=None, staging_bytes=64 << 20) as checkpointer:
        checkpointer.save(1, state).result(120)


def main(part: str, folder: str, kind: str = "") -> None:
    before = peak_mib()
    if part == "make":
        make(folder)
    elif part == "export":
        export(f"{folder}/r", f"{folder}/{kind}", run="exp", format=kind)
    else:
        import_checkpoint(f"{folder}/{kind}", f"{folder}/r", run=kind, base="exp")
    print(json.dumps({"before": before, "peak": peak_mib()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
