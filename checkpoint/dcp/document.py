"""The document in a rank's manifest for a step that DCP saved, and DCP's names for a step that a Checkpointer saved.

DCP flattens a nested state into names ("model.layers.0.weight") and paths. A document holds the rank's own values and
the paths. A value that only other ranks hold (pipeline stages) is read from their documents.

`headrace.checkpoint.restoring.dcp_names` reads such documents.

Invariant: if several ranks have a value under one name, each rank sees its own. So rank-local state is preserved even
though all ranks use the same name.
Failure behaviour: `CorruptionError` for a malformed document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring.dcp_names import Names, Path, is_dcp, of_document, path_from_cuts
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.build import kind_name
from headrace.checkpoint.state.flatten import Leaf, flatten
from headrace.checkpoint.state.tree import DCP_MARK, MetaNode, PartsNode, StatefulNode, TensorRef, ValueNode, ViewRef
from headrace.dataio.core.errors import UnsupportedError, UsageError

_MANY = 20_000
"""From this number of tensors on, each name is written once, under "many", with the lengths of its path's parts.
"""


def encode(
    tensors: Iterable[str], values: Mapping[str, object], paths: Mapping[str, Path] | None
) -> tuple[bytes, list[Leaf]]:
    """The document of one rank, and the tensors inside its values.

    Such tensors are rank-local. They exist if a planner does not flatten containers and saves them as values. Raises
    `UsageError` with the name of an entry that cannot be saved.
    """
    refs = {name: TensorRef(name) for name in tensors}
    flat = flatten({"values": dict(values)})
    for leaf in flat.leaves:
        if leaf.local.sharded or leaf.name in refs:
            problem = "is spread over ranks" if leaf.local.sharded else "has the name of another one"
            raise UsageError(f"{leaf.name}: a tensor inside of a value {problem}", hint="leave flatten_state_dict=True")
    document: Any = flat.tree
    _require_plain(document["values"], "values")
    where = {name: tuple(path) for name, path in (paths or {}).items()}
    if len(refs) < _MANY:
        return tree.encode({"by": DCP_MARK, **document, "tensors": refs, "paths": where}), flat.leaves
    cuts = {name: _cuts(name, where[name]) for name in refs if name in where}
    where = {name: path for name, path in where.items() if cuts.get(name) is None}
    many = [[name, cuts.get(name)] for name in refs]
    return tree.encode({"by": DCP_MARK, **document, "many": many, "paths": where}, newer=True), flat.leaves


def _cuts(name: str, path: Path) -> tuple[int, ...] | None:
    """The length of each part of the path in the name, negative for an integer part.

    None if the name is not the path's parts with one character between them.
    """
    cuts = tuple(-len(str(part)) if isinstance(part, int) else len(part) for part in path)
    return cuts if path_from_cuts(name, cuts) == path else None


def _require_plain(node: object, path: str) -> None:
    if isinstance(node, (StatefulNode, PartsNode, MetaNode)):
        raise UsageError(
            f"{path}: {kind_name(node)} inside of a value cannot be saved", hint="leave flatten_state_dict=True"
        )
    inside = node.value if isinstance(node, ValueNode) else node
    items = (
        inside.items() if isinstance(inside, dict) else enumerate(inside) if isinstance(inside, (list, tuple)) else ()
    )
    for key, value in items:
        _require_plain(value, tree.join(path, key))


def names_of(step: Step, rank: int) -> Names:
    """The names of a step, as `rank` sees them."""
    own_number = rank if rank < len(step.manifests) else 0
    order = [step.manifests[own_number], *(m for m in step.manifests if m.rank != own_number)]
    names = Names()
    for manifest in order:
        document = tree.decode(manifest.tree)
        names_of_manifest = of_document(document) if is_dcp(document) else _of_state(document)
        names.values = {**names_of_manifest.values, **names.values}
        names.tensors = {**names_of_manifest.tensors, **names.tensors}
        names.paths = {**names_of_manifest.paths, **names.paths}
    return names


def _of_state(document: object) -> Names:
    """A state that a Checkpointer saved, flattened as DCP does."""
    refs: dict[int, tuple[str, torch.Tensor]] = {}
    flat, paths = flatten_state_dict(_with_stand_ins(document, refs))
    names = Names(paths=dict(paths))
    for name, value in flat.items():
        if id(value) in refs:
            names.tensors[name] = refs[id(value)][0]
        else:
            names.values[name] = value
    return names


def _with_stand_ins(node: Any, refs: dict[int, tuple[str, torch.Tensor]]) -> Any:
    if isinstance(node, TensorRef):
        stand_in = torch.empty(0, device="meta")
        refs[id(stand_in)] = node.name, stand_in
        return stand_in
    if isinstance(node, StatefulNode):
        return _with_stand_ins(node.state, refs)
    if isinstance(node, (ViewRef, PartsNode, MetaNode)):
        raise UnsupportedError("the step holds tensors that DCP cannot load", hint="restore it with a Checkpointer")
    if isinstance(node, dict):
        return {key: _with_stand_ins(value, refs) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_with_stand_ins(value, refs) for value in node)
    return node
