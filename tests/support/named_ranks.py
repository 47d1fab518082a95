"""A training of `training` on every rank: `ranks_job.py KIND FOLDER STOP`."""

from __future__ import annotations

import importlib
import os

from tests.support.ranks import in_group


@in_group
def main(kind: str, folder: str, stop: str) -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    importlib.import_module(f"tests.support.train_{kind}").main(folder, stop)
