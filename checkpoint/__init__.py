"""Checkpoints of training state: asynchronous, deduplicated, verified, committed by one conditional write.

Invariant: importing this package does not import torch; the names below are the whole public surface.
Failure behaviour: errors of `dataio.core.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataio.core.lazy import exports

if TYPE_CHECKING:
    from checkpoint.api import Checkpointer
    from checkpoint.handle import Handle, SaveResult
    from checkpoint.lifecycle.keep import Keep
    from checkpoint.restoring.reading import read
    from checkpoint.rng import RNG

__all__ = ["RNG", "Checkpointer", "Handle", "Keep", "SaveResult", "read"]

_WHERE = {
    "Checkpointer": "checkpoint.api",
    "Handle": "checkpoint.handle",
    "Keep": "checkpoint.lifecycle.keep",
    "RNG": "checkpoint.rng",
    "SaveResult": "checkpoint.handle",
    "read": "checkpoint.restoring.reading",
}

__getattr__, __dir__ = exports(__name__, _WHERE)
