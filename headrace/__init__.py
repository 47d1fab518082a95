"""The I/O service of a training cluster: video and audio in, checkpoints out.

The names below are what most trainers need. Each loads its module on first use, so `import headrace` imports neither torch nor a
decoder. The rest of the public interface is in `headrace.loaders`, `headrace.checkpoint` and `headrace.dataio`.

In the repository this folder holds links to the packages beside it: docs/design/0033 says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.dataio.core.imports import exports

if TYPE_CHECKING:
    from headrace.checkpoint import RNG, Checkpointer, Keep, read
    from headrace.dataio import Dataset, index, open_store, pack
    from headrace.loaders import AudioLoader, Clip, FileLoader, Loader, VideoLoader

__all__ = [
    "RNG",
    "AudioLoader",
    "Checkpointer",
    "Clip",
    "Dataset",
    "FileLoader",
    "Keep",
    "Loader",
    "VideoLoader",
    "index",
    "open_store",
    "pack",
    "read",
]

_HOME = {
    "AudioLoader": "headrace.loaders",
    "Checkpointer": "headrace.checkpoint",
    "Clip": "headrace.loaders",
    "Dataset": "headrace.dataio",
    "FileLoader": "headrace.loaders",
    "Keep": "headrace.checkpoint",
    "Loader": "headrace.loaders",
    "RNG": "headrace.checkpoint",
    "VideoLoader": "headrace.loaders",
    "index": "headrace.dataio",
    "open_store": "headrace.dataio",
    "pack": "headrace.dataio",
    "read": "headrace.checkpoint",
}

__getattr__, __dir__ = exports(__name__, _HOME)
