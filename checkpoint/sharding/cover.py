"""Whether shards make up their global tensor: no element twice, none missing.

Boxes that are split from one another along some dimension are told apart by sorting along it, so a tensor in a thousand
shards costs a thousand comparisons, not a million.

Invariant: `flaw` returns None only for boxes that are disjoint and hold every element.
Failure behaviour: the flaw is named; callers know which tensor and step it is of.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from headrace.checkpoint.format.chunking import Box


def flaw(boxes: Sequence[Box]) -> str | None:
    """What is wrong with these shards of one tensor, or None. There is at least one box; all are of the same shape."""
    full = [box for box in boxes if 0 not in box.local]
    pair = _overlap(full, 0)
    if pair is not None:
        return f"shards at {list(pair[0].offset)} and {list(pair[1].offset)} overlap"
    held, all_of_it = sum(math.prod(box.local) for box in full), math.prod(boxes[0].shape)
    return None if held == all_of_it else f"its shards hold {held} of {all_of_it} elements"


def _overlap(boxes: Sequence[Box], dim: int) -> tuple[Box, Box] | None:
    if len(boxes) < 2:
        return None
    if dim == len(boxes[0].shape):
        return boxes[0], boxes[1]
    same: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        same[box.offset[dim], box.local[dim]].append(box)
    edges = sorted(same)
    if any(a + n > b for (a, n), (b, _) in itertools.pairwise(edges)):
        return next((pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])), None)
    found = (_overlap(group, dim + 1) for group in same.values())
    return next((pair for pair in found if pair is not None), None)
