"""Streaming loaders for training: exact order, decoded clips, a state of a few bytes.

Each public name imports its module on first use. So `from headrace import loaders` starts nothing and imports no
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
    from headrace.loaders.field_loader import Loader
    from headrace.loaders.fields.arrays import Npy, Safetensors
    from headrace.loaders.fields.audio import Audio
    from headrace.loaders.fields.base import Field, FieldInput
    from headrace.loaders.fields.pictures import Mask
    from headrace.loaders.fields.registry import field_from, register_field
    from headrace.loaders.fields.rows import Rows
    from headrace.loaders.fields.text import Bytes, Json, Text
    from headrace.loaders.fields.video import Image, Video
    from headrace.loaders.file_loader import FileLoader
    from headrace.loaders.planes import planes_to_rgb, split_planes
    from headrace.loaders.quarantine.shared_list import QuarantineList
    from headrace.loaders.sampling.buckets import Bucket, Buckets, Durations
    from headrace.loaders.sampling.mixture import Mixture
    from headrace.loaders.sampling.order import Order
    from headrace.loaders.sampling.packing import Packing
    from headrace.loaders.video_loader import VideoLoader

__all__ = [
    "Audio",
    "AudioLoader",
    "AudioSpec",
    "Bucket",
    "Buckets",
    "Bytes",
    "Clip",
    "Durations",
    "Field",
    "FieldInput",
    "FileLoader",
    "Image",
    "Json",
    "Loader",
    "LogMel",
    "Mask",
    "Mixture",
    "Npy",
    "Order",
    "Packing",
    "QuarantineList",
    "Rows",
    "Safetensors",
    "Text",
    "Video",
    "VideoLoader",
    "Window",
    "field_from",
    "planes_to_rgb",
    "register_decoder",
    "register_field",
    "split_planes",
]

_HOME = {
    "Audio": "headrace.loaders.fields.audio",
    "AudioLoader": "headrace.loaders.audio_loader",
    "AudioSpec": "headrace.loaders.audio.spec",
    "Bucket": "headrace.loaders.sampling.buckets",
    "Buckets": "headrace.loaders.sampling.buckets",
    "Bytes": "headrace.loaders.fields.text",
    "Clip": "headrace.loaders.clip",
    "Durations": "headrace.loaders.sampling.buckets",
    "Field": "headrace.loaders.fields.base",
    "FieldInput": "headrace.loaders.fields.base",
    "FileLoader": "headrace.loaders.file_loader",
    "Image": "headrace.loaders.fields.video",
    "Json": "headrace.loaders.fields.text",
    "Loader": "headrace.loaders.field_loader",
    "LogMel": "headrace.loaders.audio.spec",
    "Mask": "headrace.loaders.fields.pictures",
    "Mixture": "headrace.loaders.sampling.mixture",
    "Npy": "headrace.loaders.fields.arrays",
    "Order": "headrace.loaders.sampling.order",
    "Packing": "headrace.loaders.sampling.packing",
    "QuarantineList": "headrace.loaders.quarantine.shared_list",
    "Rows": "headrace.loaders.fields.rows",
    "Safetensors": "headrace.loaders.fields.arrays",
    "Text": "headrace.loaders.fields.text",
    "Video": "headrace.loaders.fields.video",
    "VideoLoader": "headrace.loaders.video_loader",
    "Window": "headrace.loaders.audio.spec",
    "field_from": "headrace.loaders.fields.registry",
    "planes_to_rgb": "headrace.loaders.planes",
    "register_decoder": "headrace.loaders.decode.registry",
    "register_field": "headrace.loaders.fields.registry",
    "split_planes": "headrace.loaders.planes",
}


_FROZEN_AT_START = 1000
"""If fewer objects than this are frozen, the program itself froze none: Python 3.12 starts with about 400."""


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause the garbage collector during an import.

    Modules are not garbage, and one collection over all objects of torch takes longer than importing any of these
    modules. Afterwards the imported objects are in the oldest generation, so the collector does not visit them during
    the first batch either.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if gc.get_freeze_count() < _FROZEN_AT_START:  # unfreeze() would also unfreeze the program's objects
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _import_with_gc_paused(module: str) -> ModuleType:
    if module in sys.modules:
        return sys.modules[module]
    with _gc_paused():
        return importlib.import_module(module)


__getattr__, __dir__ = exports(__name__, _HOME, _import_with_gc_paused)
