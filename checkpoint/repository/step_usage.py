"""Adds up the stored bytes of each step, and of each group of tensors, and how many of them only that step needs.

A chunk counts once for each step that names it. It is *unique* to a step if no other step of the counted runs names it:
its bytes are what removing the step would free, apart from packs that stay because of other chunks. A group is the first
part of a tensor's name, such as "model" or "optimizer". If one chunk holds tensors of several groups, each group counts
its share.
Cost: all manifests are read once, a few at a time. Memory: `BYTES_PER_CHUNK` bytes for each distinct chunk (1 TB in
chunks of 4 MiB: 10 MB; twice that with groups), the chunks of the steps that are read at the same time, and a few
manifests of each.
Chunks are told apart by 64 bits of their digests. So among a
billion chunks, two are confused with a probability of 3 %.
Failure behaviour: `NotFoundError` if there is no repository or no such run. Damaged steps are left out; `survey` reports
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.inventory import many
from headrace.checkpoint.repository.survey import StepLine, survey
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError
from headrace.dataio.store.base import Store

BYTES_PER_CHUNK = 40
"""A key, an owner and a size, of which an addition makes a second copy."""
OTHER_GROUP = "(other)"
MANIFESTS_AT_ONCE = 64
"""Steps are read at the same time if they have at most this many manifests together."""
MOST_GROUPS = 1000
"""The maximum number of groups. The tensors of the others are counted as `OTHER_GROUP`."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
Keys = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]


@dataclass(slots=True)
class GroupUsage:
    """The bytes of a group of tensors. `stored`: of the chunks that the step names; `unique`: of those, only this step."""

    group: str
    state: int = 0
    stored: int = 0
    unique: int = 0

    @property
    def shared(self) -> int:
        return self.stored - self.unique


@dataclass(slots=True)
class StepUsage:
    """The bytes of one step, in total and by group."""

    run: str
    timeline: int
    step: int
    current: bool
    state: int = 0
    stored: int = 0
    unique: int = 0
    groups: list[GroupUsage] = field(default_factory=list)

    @property
    def shared(self) -> int:
        return self.stored - self.unique


class _Items(NamedTuple):
    """Distinct chunks of one step: keys, stored bytes, and the number of the row that counts them."""

    keys: Keys
    sizes: Sizes


def step_usage(
    store: Store, run: str | None = None, *, by_group: bool = False, clock: Clock = SYSTEM_CLOCK
) -> list[StepUsage]:
    """Add up the chunks of every step of the repository, or of one run.

    Args:
        store (Store): The repository.
        run (str | None): The run. Default: all runs.
        by_group (bool): Also add up each group of tensors. Default: False.
        clock (Clock): The clock. Default: the system's.

    Returns:
        list[StepUsage]: The steps by run, timeline and number.

    Raises:
        NotFoundError: There is no repository, or no such run.
    """
    lines = sorted(survey(store, run, clock).steps, key=lambda line: (line.run, line.timeline, line.step))
    return usage_of(store, lines, by_group=by_group)


def usage_of(store: Store, lines: Iterable[StepLine], *, by_group: bool = False) -> list[StepUsage]:
    """As `step_usage`, of these steps. A chunk that only steps outside of `lines` share counts as unique."""
    counts, found = _Owners(), list[tuple[StepUsage, int, dict[str, int]]]()
    for step in _read_steps(store, list(lines), by_group):
        found.append((step.usage, *_count(step, counts)))
    for usage, number, groups in found:
        usage.stored, usage.unique = counts.of(number)
        for group in usage.groups:
            group.stored, group.unique = counts.of(groups[group.group])
    return [usage for usage, _, _ in found]


@dataclass(slots=True)
class _StepItems:
    """What was read of one step: its chunks, and those of each group."""

    usage: StepUsage
    chunks: _Items
    groups: dict[str, list[_Items]]


def _read_steps(store: Store, lines: list[StepLine], by_group: bool) -> Iterator[_StepItems]:
    """Read the steps in order. Steps of few ranks are read several at a time."""
    at = 0
    while at < len(lines):
        several = max(MANIFESTS_AT_ONCE // max(lines[at].world_size, 1), 1)
        yield from many(partial(_read_step, store, by_group), lines[at : at + several])
        at += several


def _read_step(store: Store, by_group: bool, line: StepLine) -> _StepItems | None:
    """Read the manifests of a step; None if it is damaged or was removed."""
    usage = StepUsage(line.run, line.timeline, line.step, line.current, line.bytes_state)
    chunks, groups = list[_Items](), defaultdict[str, list[_Items]](list)
    states: dict[str, int] = defaultdict(int)
    try:
        sealed = fetch.sealed(store, line.run, line.base)
        digests = fetch.digests_of(store, sealed, range(sealed.attempt.world_size))
        for manifest in fetch.read_manifests(store, sealed, digests):
            chunks.append(_all_chunks(manifest))
            for group, state, items in _by_group(manifest, states) if by_group else ():
                states[group] += state
                groups[group].append(items)
    except (CorruptionError, NotFoundError, UnsupportedError):
        return None
    usage.groups = [GroupUsage(group, states[group]) for group in sorted(groups)]
    return _StepItems(usage, _distinct(chunks), groups)


def _count(step: _StepItems, counts: _Owners) -> tuple[int, dict[str, int]]:
    """Add the step's chunks to `counts`. Returns the number of its row, and of each group's row."""
    number = counts.add(step.chunks)
    salts = {group: counts.salt(group) for group in step.groups}
    return number, {
        group: counts.add(_distinct(_Items(each.keys ^ salts[group], each.sizes) for each in items))
        for group, items in step.groups.items()
    }


def _all_chunks(manifest: Manifest) -> _Items:
    return _Items(
        _keys([chunk.digest for chunk in manifest.chunks]),
        np.array([chunk.stored for chunk in manifest.chunks], np.int64),
    )


def _by_group(manifest: Manifest, known: dict[str, int]) -> Iterator[tuple[str, int, _Items]]:
    """(group, bytes of state, chunks) of one manifest. The chunks' sizes are the group's shares."""
    state: dict[str, int] = defaultdict(int)
    spans: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    for tensor in manifest.tensors:
        group = tensor.name.partition("/")[0]
        if group not in known and group not in state and len(known) + len(state) >= MOST_GROUPS:
            group = OTHER_GROUP
        state[group] += tensor.nbytes
        spans[group].update((span.chunk, span.start, span.length) for span in tensor.spans)
    for group, named in spans.items():
        shares: dict[int, int] = defaultdict(int)
        for number, _, length in named:
            chunk = manifest.chunks[number]
            shares[number] = min(chunk.stored, shares[number] + -(-chunk.stored * length // chunk.raw))
        keys = _keys([manifest.chunks[number].digest for number in shares])
        yield group, state[group], _Items(keys, np.array(list(shares.values()), np.int64))


def _keys(digests: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(digest[:8] for digest in digests), np.uint64).copy()


def _distinct(parts: Iterable[_Items]) -> _Items:
    """Each chunk once. Ranks that share a chunk count its largest share."""
    listed = list(parts)
    if not listed:
        return _Items(np.empty(0, np.uint64), np.empty(0, np.int64))
    keys, sizes = np.concatenate([each.keys for each in listed]), np.concatenate([each.sizes for each in listed])
    order = np.lexsort((-sizes, keys))
    keys, sizes = keys[order], sizes[order]
    first = np.ones(len(keys), bool)
    first[1:] = keys[1:] != keys[:-1]
    return _Items(keys[first], sizes[first])


class _Owners:
    """Which row named each chunk: a row's number, or -1 for several. Arrays are sorted by key."""

    def __init__(self) -> None:
        self._keys, self._owners = np.empty(0, np.uint64), np.empty(0, np.int32)
        self._sizes = np.empty(0, np.int64)
        self._stored: list[int] = []
        self._salts: dict[str, np.uint64] = {}

    def add(self, items: _Items) -> int:
        """Add the chunks of one row, and return its number."""
        number = len(self._stored)
        self._stored.append(int(items.sizes.sum()))
        at = np.searchsorted(self._keys, items.keys)
        inside = np.minimum(at, max(len(self._keys) - 1, 0))
        known = self._keys[inside] == items.keys if len(self._keys) else np.zeros(len(at), bool)
        self._owners[at[known]] = -1
        new = ~known
        self._keys = np.insert(self._keys, at[new], items.keys[new])
        self._owners = np.insert(self._owners, at[new], number)
        self._sizes = np.insert(self._sizes, at[new], items.sizes[new])
        return number

    def of(self, number: int) -> tuple[int, int]:
        """(stored, unique) bytes of a row."""
        return self._stored[number], int(self._sizes[self._owners == number].sum())

    def salt(self, group: str) -> np.uint64:
        """A number that tells the chunks of this group from those of steps and of other groups."""
        if group not in self._salts:
            with np.errstate(over="ignore"):
                self._salts[group] = np.uint64(len(self._salts) + 1) * _MIX
        return self._salts[group]
