"""Millrace's floors 0 to 2: storage, dataset shards, the node cache and the sidecar. Never imports torch.

The public names load their modules on first use, so that `import dataio` and `millrace --help` cost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataio.shards.dataset import Dataset
    from dataio.shards.facts import Recipe
    from dataio.shards.in_place import index
    from dataio.shards.manifests import Columns
    from dataio.shards.pack import PackReport, append, pack
    from dataio.shards.preview import preview
    from dataio.shards.verify import VerifyReport, verify
    from dataio.store.open import open_store

__all__ = [
    "Columns",
    "Dataset",
    "PackReport",
    "Recipe",
    "VerifyReport",
    "append",
    "index",
    "open_store",
    "pack",
    "preview",
    "verify",
]

_HOME = {
    "Columns": "dataio.shards.manifests",
    "Dataset": "dataio.shards.dataset",
    "PackReport": "dataio.shards.pack",
    "VerifyReport": "dataio.shards.findings",
    "Recipe": "dataio.shards.facts",
    "append": "dataio.shards.pack",
    "index": "dataio.shards.in_place",
    "open_store": "dataio.store.open",
    "pack": "dataio.shards.pack",
    "preview": "dataio.shards.preview",
    "verify": "dataio.shards.verify",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dataio' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
