"""Write samples in litdata's own format, for measuring its reader.

Invariant: only `target` changes. litdata's temporary files go to a scratch folder: by default litdata empties the folders
`data` and `chunks` of the system's temporary folder.
Failure behaviour: litdata's own errors are raised; the scratch folder is deleted.
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
