"""Checkpoints of training state: asynchronous, deduplicated, verified, committed by one conditional write.

docs/glossary.md defines the terms, such as step, attempt, timeline, pack and lease.

Invariant: importing this package does not import torch. The names below are the whole public interface.
Failure behaviour: errors of `headrace.dataio.core.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.dataio.core.imports import exports

if TYPE_CHECKING:
    from headrace.checkpoint.api import Checkpointer
    from headrace.checkpoint.artifacts import read_artifact
    from headrace.checkpoint.compare.diff import diff
    from headrace.checkpoint.copies.copy import copy
    from headrace.checkpoint.exchange.exporting import export
    from headrace.checkpoint.exchange.importing import import_checkpoint
    from headrace.checkpoint.handle import Handle, SaveResult
    from headrace.checkpoint.publishing.subscriber import Subscriber
    from headrace.checkpoint.repository.retention import Keep
    from headrace.checkpoint.restoring.saved_step import read
    from headrace.checkpoint.rng import RNG

__all__ = [
    "RNG",
    "Checkpointer",
    "Handle",
    "Keep",
    "SaveResult",
    "Subscriber",
    "copy",
    "diff",
    "export",
    "import_checkpoint",
    "read",
    "read_artifact",
]

_WHERE = {
    "Checkpointer": "headrace.checkpoint.api",
    "Handle": "headrace.checkpoint.handle",
    "Keep": "headrace.checkpoint.repository.retention",
    "RNG": "headrace.checkpoint.rng",
    "SaveResult": "headrace.checkpoint.handle",
    "Subscriber": "headrace.checkpoint.publishing.subscriber",
    "copy": "headrace.checkpoint.copies.copy",
    "diff": "headrace.checkpoint.compare.diff",
    "export": "headrace.checkpoint.exchange.exporting",
    "import_checkpoint": "headrace.checkpoint.exchange.importing",
    "read": "headrace.checkpoint.restoring.saved_step",
    "read_artifact": "headrace.checkpoint.artifacts",
}

__getattr__, __dir__ = exports(__name__, _WHERE)
