"""As `example_program`, for a program with torchtitan, which the nursery has imported already.

torchtitan's models import Triton for kernels that run on GPUs only. torch for CPUs does not install it. Where it is missing,
a stand-in is there while torchtitan is imported. torch's own modules are imported before, since they look for Triton, too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from unittest.mock import MagicMock

from tests.support.example_program import main

_MODELS = "torchtitan.models.llama3"

with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module(_MODELS)
if importlib.util.find_spec("triton") is None:
    sys.modules.update({"triton": MagicMock(), "triton.language": MagicMock()})
    importlib.import_module(_MODELS)
    del sys.modules["triton"], sys.modules["triton.language"]
importlib.import_module("headrace.checkpoint.frameworks.torchtitan")

__all__ = ["main"]
