"""litdata's own form of samples, beside whose reader ours is measured.

Purpose: written with a scratch folder of its own. Left to itself litdata empties the folders `data` and `chunks` in the
system's temporary folder, whoever's they are.
Invariant: nothing outside `target` is changed.
Failure behaviour: litdata's own errors; the scratch folder goes with them.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def optimize(read: Callable[[Any], Any], inputs: list[Any], target: Path, chunk_bytes: str) -> None:
    """`read(input)` of all inputs, in chunks in `target`, by one process."""
    litdata: Any = importlib.import_module("litdata")
    with tempfile.TemporaryDirectory(prefix="headrace-litdata-", dir=target.parent) as scratch:
        folders = {
            "DATA_OPTIMIZER_CACHE_FOLDER": f"{scratch}/chunks",
            "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{scratch}/data",
        }
        before = dict(os.environ)
        os.environ.update(folders)
        try:
            litdata.optimize(read, inputs=inputs, output_dir=str(target), chunk_bytes=chunk_bytes, num_workers=1)
        finally:
            os.environ.clear()
            os.environ.update(before)
