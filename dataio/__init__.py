"""Storage, dataset shards, the node cache and the sidecar. This package never imports torch.

The public names load their modules on first use, so that `from headrace import dataio` and `headrace --help` cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.dataio.core.imports import exports

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.ingest.index import index
    from headrace.dataio.shards.ingest.manifests import Columns
    from headrace.dataio.shards.ingest.pack import PackReport, append, pack
    from headrace.dataio.shards.media.messages import Recipe
    from headrace.dataio.shards.preview import preview
    from headrace.dataio.shards.verify.dataset_check import VerifyReport, verify
    from headrace.dataio.store.open import open_store

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
    "Columns": "headrace.dataio.shards.ingest.manifests",
    "Dataset": "headrace.dataio.shards.dataset",
    "PackReport": "headrace.dataio.shards.ingest.pack",
    "VerifyReport": "headrace.dataio.shards.verify.report",
    "Recipe": "headrace.dataio.shards.media.messages",
    "append": "headrace.dataio.shards.ingest.pack",
    "index": "headrace.dataio.shards.ingest.index",
    "open_store": "headrace.dataio.store.open",
    "pack": "headrace.dataio.shards.ingest.pack",
    "preview": "headrace.dataio.shards.preview",
    "verify": "headrace.dataio.shards.verify.dataset_check",
}

__getattr__, __dir__ = exports(__name__, _HOME)
