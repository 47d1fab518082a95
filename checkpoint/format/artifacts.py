"""Artifacts of a step: files that are stored as tensors of bytes, under reserved names.

The tree of the state does not refer to these tensors, so a restore ignores them.
Invariant: a tensor is an artifact if its name begins with `PREFIX` and it is a one-dimensional tensor of bytes that
belongs to one rank.
Failure behaviour: `check_name` raises `UsageError`; nothing else fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.checkpoint.format.manifest import Manifest, Tensor
from headrace.dataio.core.errors import UsageError

PREFIX = "headrace.artifact/"
MAX_COUNT = 256
"""The maximum number of artifacts of one step on one rank."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*(?:/[A-Za-z0-9_][A-Za-z0-9._+ -]*)*")
_NAME_CHARACTERS = 200


def check_name(name: object) -> str:
    """Return `name` if it can name an artifact; raise `UsageError` otherwise."""
    if not isinstance(name, str) or len(name) > _NAME_CHARACTERS or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.220} cannot name an artifact",
            hint="use letters, digits, ' ', '.', '-', '+' and '_', with '/' between folders, such as samples/0.png; "
            f"at most {_NAME_CHARACTERS} characters",
        )
    return name


def of_manifest(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each artifact of this rank."""
    for tensor in manifest.tensors:
        is_bytes = tensor.dtype == "uint8" and len(tensor.shape) == 1 and not tensor.replicated
        if is_bytes and tensor.name.startswith(PREFIX):
            yield tensor.name.removeprefix(PREFIX), tensor
