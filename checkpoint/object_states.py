"""The states of a step's objects that are JSON: positions of loaders, schedulers, counters.

Purpose: `headrace ckpt state` prints such a state, and `headrace samples --checkpoint` uses the position of a loader.
Invariant: only the manifest of one rank is read, and no tensor. Nothing is unpickled or imported, and torch is not needed.
Failure behaviour: `NotFoundError` for a run, step, rank or name that does not exist lists those that do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.checkpoint.repository import check, fetch
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.tree import DCP_MARK, StatefulNode, join
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.core.limits import counted
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

_SHOWN = 20


def object_states(url: str | os.PathLike[str] | Store, run: str, step: str = "latest", rank: int = 0) -> dict[str, Any]:
    """Return all parts of a step that are JSON objects, by their paths in the state.

    Args:
        url (str | os.PathLike | Store): the repository.
        run (str): the run.
        step (str): a number, "latest", or a tag as "tag:NAME". Default: "latest".
        rank (int): the rank that saved the states. Default: 0.

    Returns:
        For each path ("loader", "objects/0"), a dict of numbers, text, lists and dicts. A dict inside such a dict has
        a path of its own.

    Raises:
        NotFoundError: the run, the step or the rank does not exist.

    Example:
        >>> import tempfile
        >>> from headrace.checkpoint import Checkpointer
        >>> folder = tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     _ = checkpointer.save(1, {"progress": {"epoch": 3, "loss": 0.5}}).result(timeout=60)
        >>> object_states(folder, "exp42")
        {'progress': {'epoch': 3, 'loss': 0.5}}
    """
    if not isinstance(url, Store):
        with open_store(url) as store:
            return object_states(store, run, step, rank)
    base = repository.find(url, run, check.step_of(step))
    if base is None:
        raise repository.missing(url, run)
    sealed = fetch.sealed(url, run, base)
    ranks = sealed.attempt.world_size
    if not 0 <= rank < ranks:
        raise NotFoundError(
            f"step {base.step} of run {run} was saved by {counted(ranks, 'rank')}, so there is no rank {rank}",
            hint=f"give a rank from 0 to {ranks - 1}",
        )
    document = tree.decode(fetch.manifest_of_rank(url, sealed, rank).tree)
    return dict(_objects(_nested(document), ""))


def object_state(states: Mapping[str, Any], name: str | None = None, what: str = "state that is JSON") -> Any:
    """Return the state called `name`, or the only one.

    Args:
        states (Mapping): what `object_states` returned.
        name (str | None): a path. None stands for the only state that is no part of another. Default: None.
        what (str): names a state in errors.

    Raises:
        NotFoundError: there is no such state. The error lists those that exist.
    """
    if name is not None and name in states:
        return states[name]
    outermost = [path for path in states if not any(path.startswith(f"{other}/") for other in states)]
    if name is None and len(outermost) == 1:
        return states[outermost[0]]
    if not states:
        raise NotFoundError(f"the step holds no {what}", hint="`headrace ckpt show --tensors` lists its tensors")
    shown = ", ".join(outermost[:_SHOWN]) + (", ..." if len(outermost) > _SHOWN else "")
    if name is None:
        raise NotFoundError(f"the step holds more than one {what}: {shown}", hint="choose one by --name")
    raise NotFoundError(f"the step holds no {what} called {name!r:.200}; there are: {shown}", hint="check --name")


def _objects(node: object, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dicts at `path` and below it that are JSON."""
    if isinstance(node, StatefulNode):
        node = node.state
    if isinstance(node, dict):
        if path and node and _is_json(node):
            yield path, _as_json(node)
        for key, value in node.items():
            yield from _objects(value, join(path, key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _objects(value, join(path, index))


def _is_json(node: object) -> bool:
    if isinstance(node, StatefulNode):
        return _is_json(node.state)
    if isinstance(node, dict):
        return all(isinstance(key, str) and _is_json(value) for key, value in node.items())
    if isinstance(node, list | tuple):
        return all(map(_is_json, node))
    return node is None or isinstance(node, bool | int | str) or (isinstance(node, float) and math.isfinite(node))


def _as_json(node: Any) -> Any:
    if isinstance(node, StatefulNode):
        return _as_json(node.state)
    if isinstance(node, dict):
        return {key: _as_json(value) for key, value in node.items()}
    return [_as_json(value) for value in node] if isinstance(node, list | tuple) else node


def _nested(document: object) -> object:
    """The values of a step that DCP saved, as the nested dicts that DCP flattened. Other documents stay as they are."""
    if not isinstance(document, dict) or document.get("by") != DCP_MARK:
        return document
    values, paths = document.get("values"), document.get("paths")
    nested: dict[Any, Any] = {}
    if not isinstance(values, dict) or not isinstance(paths, dict):
        return nested
    for name, value in values.items():
        path = paths.get(name)
        if not isinstance(path, tuple) or not 0 < len(path) <= tree.MAX_DEPTH:
            path = (name,)
        inner: Any = nested
        for part in map(str, path[:-1]):
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[str(path[-1])] = value
    return nested
