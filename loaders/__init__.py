"""Streaming loaders for training: exact order, decoded clips, a state of a few bytes.

The public names load their modules on first use, so that `from headrace import loaders` starts nothing and imports no
decoder.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from headrace.dataio.core.imports import exports

if TYPE_CHECKING:
    from headrace.loaders.audio.spec import AudioSpec, LogMel, Window
    from headrace.loaders.audio_loader import AudioLoader
    from headrace.loaders.clip import Clip
    from headrace.loaders.decode.registry import register_decoder
    from headrace.loaders.file_loader import FileLoader
    from headrace.loaders.quarantine.shared_list import QuarantineList
    from headrace.loaders.sampling.buckets import Bucket, Buckets, Durations
    from headrace.loaders.sampling.mixture import Mixture
    from headrace.loaders.sampling.order import Order
    from headrace.loaders.sampling.packing import Packing
    from headrace.loaders.video_loader import VideoLoader

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
    "register_decoder",
]

_HOME = {
    "AudioLoader": "headrace.loaders.audio_loader",
    "AudioSpec": "headrace.loaders.audio.spec",
    "Bucket": "headrace.loaders.sampling.buckets",
    "Buckets": "headrace.loaders.sampling.buckets",
    "Clip": "headrace.loaders.clip",
    "Durations": "headrace.loaders.sampling.buckets",
    "FileLoader": "headrace.loaders.file_loader",
    "LogMel": "headrace.loaders.audio.spec",
    "Mixture": "headrace.loaders.sampling.mixture",
    "Order": "headrace.loaders.sampling.order",
    "Packing": "headrace.loaders.sampling.packing",
    "QuarantineList": "headrace.loaders.quarantine.shared_list",
    "VideoLoader": "headrace.loaders.video_loader",
    "Window": "headrace.loaders.audio.spec",
    "register_decoder": "headrace.loaders.decode.registry",
}


_FROZEN_AT_START = 1000
"""With fewer frozen objects, the program froze none itself: Python 3.12 begins with some 400."""


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Import without the garbage collector.

    Modules are not garbage, and searching all objects of torch takes longer than any import of ours. The imported
    objects then count as old, so the collector does not search them during the first batch either.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if gc.get_freeze_count() < _FROZEN_AT_START:  # else the objects that the program froze would be unfrozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _imported(module: str) -> ModuleType:
    if module in sys.modules:
        return sys.modules[module]
    with _gc_paused():
        return importlib.import_module(module)


__getattr__, __dir__ = exports(__name__, _HOME, _imported)
