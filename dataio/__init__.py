"""Millrace's floors 0 to 2: storage, dataset shards, the node cache and the sidecar. Never imports torch.

The public names load their modules on first use, so that `import dataio` and `millrace --help` cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataio.core.lazy import exports

if TYPE_CHECKING:
    from dataio.shards.dataset import Dataset
    from dataio.shards.in_place.indexing import index
    from dataio.shards.ingest.manifests import Columns
    from dataio.shards.ingest.pack import PackReport, append, pack
    from dataio.shards.look.preview import preview
    from dataio.shards.media.facts import Recipe
    from dataio.shards.verify.run import VerifyReport, verify
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
    "Columns": "dataio.shards.ingest.manifests",
    "Dataset": "dataio.shards.dataset",
    "PackReport": "dataio.shards.ingest.pack",
    "VerifyReport": "dataio.shards.verify.findings",
    "Recipe": "dataio.shards.media.facts",
    "append": "dataio.shards.ingest.pack",
    "index": "dataio.shards.in_place.indexing",
    "open_store": "dataio.store.open",
    "pack": "dataio.shards.ingest.pack",
    "preview": "dataio.shards.look.preview",
    "verify": "dataio.shards.verify.run",
}

__getattr__, __dir__ = exports(__name__, _HOME)
