"""Who writes what several ranks hold: pure, and the same answer on every rank without talking.

Invariant: each (tensor, box) is written by exactly one of the ranks that hold it; among the ranks that hold the same boxes
the work is spread by bytes, the largest first.
Failure behaviour: none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Held = tuple[str, int, Sequence[int]]
"""Name, bytes, and the ranks that hold these very bytes, ascending."""


def owners(held: Iterable[Held]) -> dict[str, int]:
    """The rank that writes each; every rank may leave out what it does not hold itself."""
    groups: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    for name, nbytes, ranks in held:
        groups[tuple(ranks)].append((-nbytes, name))
    found: dict[str, int] = {}
    for ranks, members in groups.items():
        load = dict.fromkeys(ranks, 0)
        for negative, name in sorted(members):
            found[name] = rank = min(ranks, key=lambda r: (load[r], r))
            load[rank] -= negative
    return found
