"""Streaming loaders for training: exact order, decoded clips, a state of a few bytes.

The public names load their modules on first use, so that `import loaders` starts nothing and imports no decoder.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from dataio.core.lazy import exports

if TYPE_CHECKING:
    from loaders.audio import AudioLoader
    from loaders.clip import Clip
    from loaders.files import FileLoader
    from loaders.mixture import Mixture
    from loaders.order import Bucket, Buckets, Durations, Order, Packing
    from loaders.samples.shared_list import QuarantineList
    from loaders.sound.features import LogMel
    from loaders.sound.spec import AudioSpec
    from loaders.sound.window import Window
    from loaders.video import VideoLoader

__all__ = [
    "AudioLoader",
    "AudioSpec",
    "Bucket",
    "Buckets",
    "Clip",
    "Durations",
    "FileLoader",
    "LogMel",
    "Mixture",
    "Order",
    "Packing",
    "QuarantineList",
    "VideoLoader",
    "Window",
]

_HOME = {
    "AudioLoader": "loaders.audio",
    "AudioSpec": "loaders.sound.spec",
    "Bucket": "loaders.order",
    "Buckets": "loaders.order",
    "Clip": "loaders.clip",
    "Durations": "loaders.order",
    "FileLoader": "loaders.files",
    "LogMel": "loaders.sound.features",
    "Mixture": "loaders.mixture",
    "Order": "loaders.order",
    "Packing": "loaders.order",
    "QuarantineList": "loaders.samples.shared_list",
    "VideoLoader": "loaders.video",
    "Window": "loaders.sound.window",
}


_FREEZE = 1000
"""Fewer objects are nobody's wish: Python 3.12 begins with some 400 that are frozen."""


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Modules are no garbage, and a look for some among all that torch has made takes longer than any import of ours. What was
    imported counts as old from here on, so that nobody looks through it with the first batch either."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if (
                gc.get_freeze_count() < _FREEZE
            ):  # else it would become what somebody wants frozen, or be all that no longer is
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _imported(module: str) -> ModuleType:
    if module in sys.modules:
        return sys.modules[module]
    with _collecting_nothing():
        return importlib.import_module(module)


__getattr__, __dir__ = exports(__name__, _HOME, _imported)
