"""What one rank writes of a state.

Invariant: every rank comes to the same division of the replicated tensors without talking; each is written by exactly one.
Failure behaviour: `UsageError` naming the path of what cannot be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint import layout, state, tree
from checkpoint.chunk import whole
from checkpoint.layout import TensorSpec
from checkpoint.manifest import replicas_digest
from checkpoint.state import Kinds, Leaf


@dataclass(frozen=True, slots=True)
class Prepared:
    """A state taken apart, on one rank. `mine`: what this rank writes; `replicas`: the digest that all ranks must share."""

    tree: bytes
    mine: list[Leaf]
    replicas: bytes

    def specs(self) -> list[TensorSpec]:
        return [_spec(leaf) for leaf in self.mine]


def prepare(given: object, kinds: Kinds, rank: int, world_size: int) -> Prepared:
    """Take `given` apart and choose this rank's share."""
    flat = state.flatten(given, kinds)
    shared = [leaf for leaf in flat.leaves if leaf.replicated]
    owners = _owners(shared, world_size)
    mine = [leaf for leaf in flat.leaves if owners.get(leaf.name, rank) == rank]
    return Prepared(tree.encode(flat.tree), mine, replicas_digest((x.name, x.dtype, x.shape) for x in shared))


def _owners(shared: Sequence[Leaf], world_size: int) -> dict[str, int]:
    spread = [(leaf.name, _spec(leaf).nbytes) for leaf in shared if not leaf.first]
    owners = dict(zip((name for name, _ in spread), layout.spread(spread, world_size), strict=True))
    return owners | {leaf.name: 0 for leaf in shared if leaf.first}


def _spec(leaf: Leaf) -> TensorSpec:
    return TensorSpec(leaf.name, leaf.dtype, whole(leaf.shape), leaf.replicated)
