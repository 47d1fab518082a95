"""A bounded number of tasks ahead of the one who takes their results in order.

Invariant: results come in the order of the items; at most `ahead` tasks are submitted and not yet taken.
Failure behaviour: the first task that raised raises here, in its turn; tasks already submitted still run to their end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """`map(work, items)` on `pool`, lazily."""
    window: deque[Future[R]] = deque()
    for item in items:
        if len(window) >= ahead:
            yield window.popleft().result()
        window.append(pool.submit(work, item))
    while window:
        yield window.popleft().result()
