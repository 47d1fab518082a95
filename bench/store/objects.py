"""The objects of a sweep: written before it, taken away after it, by name.

Invariant: everything lies under one fresh random prefix, and exactly the keys that a sweep can have written are deleted,
one by one by name: nothing is listed and deleted, so an object of somebody else is never touched, also not below that
prefix. Failure behaviour: an error of the store is the sweep's; what could not be deleted is named.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator

from headrace.bench.store.cells import LISTED, SMALL, Cell, Sweep
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store

COUNT = 8
"""Objects of each size, read or written in turn."""
_BLOCK = 16 * MIB


def fresh_prefix() -> str:
    """A prefix that nobody has used."""
    return f"headrace-bench-{uuid.uuid4().hex}"


def key_of(cell: Cell, number: int, sweep: Sweep) -> str:
    """The object of a request: reads share what was prepared, writers have their own."""
    if cell.operation == "list":
        return "list/"
    size = sweep.largest if cell.operation in ("range", "small") else cell.size
    kind = "read" if cell.operation in ("get", "range", "small") else cell.operation
    return f"{kind}/{size}/{number % COUNT}"


def prepared(sweep: Sweep) -> dict[str, int]:
    """Key → size of what has to be there before the first request."""
    sizes = set(sweep.sizes if "get" in sweep.operations else ())
    if {"range", "small"} & set(sweep.operations):
        sizes.add(sweep.largest)
    found = {f"read/{size}/{number}": size for size in sorted(sizes) for number in range(COUNT)}
    if "list" in sweep.operations:
        found |= {f"list/{number:05d}": min(SMALL, 16) for number in range(LISTED)}
    return found


def all_keys(sweep: Sweep) -> list[str]:
    """Every key that the sweep may have written."""
    written = {
        key_of(cell, number, sweep)
        for cell in sweep.cells()
        if cell.operation in ("put", "multipart")
        for number in range(COUNT)
    }
    return sorted(written | set(prepared(sweep)))


def prepare(store: Store, sweep: Sweep, tell: Callable[[str, float], None]) -> int:
    """Write what is read; bytes. Contents are random, so that nothing on the way can compress them."""
    wanted = prepared(sweep)
    for place, (key, size) in enumerate(wanted.items()):
        tell("writing objects", place / len(wanted))
        if size <= _BLOCK:
            store.put(key, random.Random(key).randbytes(size))
        else:
            store.put_multipart(key, _blocks(key, size))
    return sum(wanted.values())


def _blocks(key: str, size: int) -> Iterator[bytes]:
    block = random.Random(key).randbytes(_BLOCK)
    while size > 0:
        yield block[:size]
        size -= len(block)
