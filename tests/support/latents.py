"""A small dataset of latents with captions, quick to make and to read, and a loader of it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataio import index
from headrace.loaders import Loader, Npy, Text
from tests.support.shared_folder import shared_folder

COUNT = 26
"""Samples. In batches of 4 over all ranks, an epoch has 6 batches, and 2 samples are left out."""


def latents_url(factory: pytest.TempPathFactory) -> str:
    """The address of the dataset."""
    return str(shared_folder(factory, "latents", _make) / "ds")


def _make(folder: Path) -> None:
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "0.tar", "w") as tar:
        for number in range(COUNT):
            np.save(latent := io.BytesIO(), np.full((4,), number, np.float32))
            for ext, data in (("latent.npy", latent.getvalue()), ("txt", f"a latent of {number}".encode())):
                member = tarfile.TarInfo(f"{number:03}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    index([str(folder / "shards")], str(folder / "ds")).close()


def latent_loader(url: str, batch_size: int = 4, **options: Any) -> Loader:
    """A loader of "latent" and "caption"."""
    fields = {"latent": Npy("latent.npy"), "caption": Text(required=False)}
    settings: dict[str, Any] = {"seed": 5, "sidecar": None, "num_threads": 1, "trust_mounts": True}
    return Loader(url, batch_size, fields=fields, **(settings | options))
