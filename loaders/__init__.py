"""Streaming loaders for training: exact order, decoded clips, a state of a few bytes.

The public names load their modules on first use, so that `import loaders` starts nothing and imports no decoder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loaders.audio import AudioSpec
    from loaders.clip import Clip
    from loaders.order import Order
    from loaders.video import VideoLoader

__all__ = ["AudioSpec", "Clip", "Order", "VideoLoader"]

_HOME = {
    "AudioSpec": "loaders.audio",
    "Clip": "loaders.clip",
    "Order": "loaders.order",
    "VideoLoader": "loaders.video",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'loaders' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
