"""Finds the positions of loaders in a saved state, and the versions of their datasets.

The state of a loader of Headrace is a dict with `seed`, `epoch` and `batch`, and with the `version` and `digest` of its
dataset, or the `sources` of its mixture.
Invariant: only the tree is decoded; no tensor is read, and torch is not imported.
Failure behaviour: a state that cannot be decoded here, such as one of DCP, has no positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.checkpoint.state import tree
from headrace.checkpoint.state.tree import StatefulNode, join
from headrace.dataio.core.errors import HeadraceError

_POSITION = {"seed", "epoch", "batch"}
_MAX = 64
"""The maximum number of loaders that are listed."""
_MAX_SOURCES = 64


def loader_positions(encoded: bytes) -> dict[str, dict[str, Any]]:
    """The position of each loader in the encoded tree, by its path: epoch, batch, and its dataset's version."""
    try:
        root = tree.decode(encoded)
    except HeadraceError:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for path, state in _states(root, ""):
        if len(found) >= _MAX:
            break
        found[path] = _position(state)
    return found


def _states(node: object, path: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    if isinstance(node, StatefulNode):
        yield from _states(node.state, path)
    elif isinstance(node, dict):
        if node.keys() >= _POSITION and ("digest" in node or "sources" in node):
            yield path, node
            return
        for key, value in node.items():
            yield from _states(value, join(path, key))
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _states(value, join(path, number))


def _position(state: dict[Any, Any]) -> dict[str, Any]:
    position: dict[str, Any] = {name: state[name] for name in ("epoch", "batch") if isinstance(state[name], int)}
    if isinstance(sources := state.get("sources"), dict):
        rows = list(sources.items())[:_MAX_SOURCES]
        position["datasets"] = {str(name): list(row[:2]) for name, row in rows if isinstance(row, (list, tuple))}
    else:
        position["dataset"] = [state.get("version"), state.get("digest")]
    return position
