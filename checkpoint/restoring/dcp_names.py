"""The contents of a step that was saved through torch.distributed.checkpoint (DCP), by DCP's names.

DCP flattens a nested state into names ("model.layers.0.weight") and paths. A rank's document holds the names that the
rank wrote, its own values, and the paths. So only the documents of all ranks together name all tensors.

Invariant: if several ranks have a value under one name, each rank sees its own.
Failure behaviour: `CorruptionError` for a malformed document.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.chunk_reader import Saved
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.tree import DCP_MARK, TensorRef
from headrace.dataio.core.errors import CorruptionError

Path = tuple[str | int, ...]
_DIGITS = 18


@dataclass(slots=True)
class Names:
    """The contents of a step by DCP's names.

    `tensors` maps them to names in the manifests. `values` holds the other values, as nodes of a tree.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def is_dcp(document: object) -> bool:
    """Whether a manifest's tree is the document of a step that DCP saved."""
    return isinstance(document, dict) and document.get("by") == DCP_MARK


def of_document(document: Any) -> Names:
    """The names in the document of one rank."""
    try:
        paths = {name: _checked(path) for name, path in document["paths"].items()}
        if "many" in document:
            cut = {name: path_from_cuts(name, cuts) for name, cuts in document["many"] if cuts is not None}
            return Names({name: name for name, _ in document["many"]}, dict(document["values"]), paths | cut)
        tensors = {name: ref.name for name, ref in document["tensors"].items()}
        return Names(tensors, dict(document["values"]), paths)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise CorruptionError(f"a document of DCP's is not readable: {error!r:.100}") from None


def _checked(path: Any) -> Path:
    if not isinstance(path, tuple) or not all(isinstance(part, (str, int)) for part in path):
        raise TypeError("a path is not a tuple of texts and numbers")
    return path


def path_from_cuts(name: str, cuts: Iterable[int]) -> Path:
    """The path whose parts have these lengths in the name. A negative length is that of an integer."""
    parts: list[str | int] = []
    at = 0
    for length in cuts:
        part = name[at : at + abs(length)]
        parts.append(int(part) if length < 0 else part)
        at += abs(length) + 1
    return tuple(parts)


def state_of(step: Step, rank: int) -> tuple[dict[Any, Any], dict[str, Saved]]:
    """The state of a step that DCP saved, as `rank` sees it, and all its tensors by name."""
    own_number = rank if rank < len(step.manifests) else 0
    names = Names()
    for manifest in (step.manifests[own_number], *(m for m in step.manifests if m.rank != own_number)):
        found = of_document(tree.decode(manifest.tree))
        names.values = {**found.values, **names.values}
        names.tensors = {**found.tensors, **names.tensors}
        names.paths = {**found.paths, **names.paths}
    return nested(names), all_tensors(step, own_number)


def nested(names: Names) -> dict[Any, Any]:
    """The state as nested dicts and lists, as it was before DCP flattened it.

    DCP writes the keys of dicts as text, and loses empty dicts. In the state of an optimizer, the numbers of parameters
    become integers again.
    """
    root: dict[Any, Any] = {}
    entries: dict[str, object] = {name: TensorRef(tensor) for name, tensor in names.tensors.items()}
    for name, node in (entries | names.values).items():
        path = names.paths.get(name, (name,))
        inside: Any = root
        if len(path) > tree.MAX_DEPTH:
            raise CorruptionError(f"the path of DCP's name {name!r:.200} has {len(path)} parts")
        for key in path[:-1]:
            inside = inside.setdefault(key, {}) if isinstance(inside, dict) else None
        if not path or not isinstance(inside, dict) or path[-1] in inside:
            raise CorruptionError(f"the paths of DCP's names collide at {name!r:.200}")
        inside[path[-1]] = _Value(node)
    return {key: _unflattened(value) for key, value in root.items()}


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that DCP saved as a whole. Its dicts and lists stay as they are."""

    value: object


def _unflattened(node: Any) -> Any:
    if isinstance(node, _Value):
        return node.value
    inner = {key: _unflattened(value) for key, value in node.items()}
    if inner and all(isinstance(key, int) for key in inner):  # only the entries of lists have such keys
        return [inner[key] for key in sorted(inner)]
    if isinstance(inner.get("param_groups"), list):
        state = inner.get("state", {})
        if isinstance(state, dict):
            numbered = {_number(key): value for key, value in state.items()}
            return {"state": numbered} | {key: value for key, value in inner.items() if key != "state"}
    return inner


def _number(key: Any) -> Any:
    """The number of a parameter; any other key as it is."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= _DIGITS else key


def all_tensors(step: Step, rank: int) -> dict[str, Saved]:
    """All tensors that the rank sees, and those that only other ranks hold."""
    rank_local: dict[str, Saved] = {}
    for manifest in step.manifests:
        for tensor in manifest.tensors:
            if not tensor.replicated:
                rank_local.setdefault(
                    tensor.name, Saved(tensor.name, tensor.dtype, tensor.shape, ((manifest, tensor),))
                )
    return rank_local | chunk_reader.tensors_of(step, rank)
