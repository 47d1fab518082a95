"""Modules that the tests of a file import at their first use, so that a worker imports only what its own tests need.

Every worker of a run imports every file with tests. Lightning and the trainer of transformers take seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class _Lazy:
    """Stands for a module. Its attributes are the public ones of the module: for others, pytest asks each name of a file."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)


def lazily(module: str, *, needs: str) -> Any:
    """The module. If the package `needs` is not installed, the tests of the file that calls this are skipped."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: `make test` installs it", allow_module_level=True)
    return _Lazy(module)
