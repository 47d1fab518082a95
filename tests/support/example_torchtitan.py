"""As `example_program`, for a program with torchtitan, which the nursery has imported already."""

from __future__ import annotations

import torchtitan.models.llama3  # noqa: F401

import headrace.checkpoint.frameworks.torchtitan  # noqa: F401
from tests.support.example_program import main

__all__ = ["main"]
