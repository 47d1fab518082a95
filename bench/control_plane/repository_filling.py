"""Fills a repository with committed steps for `headrace.bench.control_plane.repository`, without running their saves.

Every rank has four tensors of a few integers:

- "weight" and "moment" are sharded over all ranks. Their values depend on the step.
- "frozen" is sharded, too, and is the same in all steps. It is stored in the packs of the first step only. The manifests
  of later steps reference these packs, as after deduplication.
- "own" is rank-local. Its values are the step and the rank.

Invariant: the objects have the keys and the contents that a saver would write. Attempt ids depend on the step only, so
another process can add a step later.
Failure behaviour: `UsageError` if there is a repository already. Errors of the store are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache

import numpy as np

from headrace.bench.control_plane.state import closing_objects
from headrace.checkpoint.format import group, manifest, names, pack
from headrace.checkpoint.format.chunking import Box, TensorSpec, digest, whole
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.group import Summary
from headrace.checkpoint.format.manifest import Chunk, Manifest, PackName, Span, Tensor
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import timeline
from headrace.checkpoint.state import tree
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Store

RUN = "exp"
LENGTH = 16
"""The number of elements that a rank has of each sharded tensor."""
SHARDED = ("weight", "moment", "frozen")
THREADS = 32
"""The number of threads that write objects."""
_STRIDE = 10**6
"""The difference between the values of two steps."""
_START, _INTERVAL = 1_780_000_000, 60
"""The time of the first commit, in seconds since the epoch, and the seconds between two commits."""
_WORKER = "00000000"
_TREE = tree.encode({**{name: tree.TensorRef(name) for name in (*SHARDED, "own")}, "format": "filled"})


def attempt_of(step: int) -> str:
    """The id of the only attempt to save the step."""
    return names.id_from_bytes((1000 * (_START + _INTERVAL * step)).to_bytes(6, "big") + step.to_bytes(10, "big"))


def elements(name: str, step: int, first: int, count: int) -> list[int]:
    """`count` elements of a sharded tensor of the step, from element `first` on."""
    sign, offset = {"weight": (1, step), "moment": (-1, step), "frozen": (1, 0)}[name]
    return [sign * (offset * _STRIDE + index) for index in range(first, first + count)]


def own_elements(step: int, rank: int) -> list[int]:
    """The elements of the tensor "own" of a rank."""
    return [step, rank]


def objects(steps: int, ranks: int) -> int:
    """The number of objects in a repository of `steps` steps of `ranks` ranks each."""
    groups = names.group_count(ranks) if names.is_grouped(ranks) else 0
    return 3 + steps * (2 * ranks + groups + 2)


def fill(store: Store, steps: int, ranks: int, progress: Callable[[int], None] = lambda _: None) -> None:
    """Create a repository and commit the steps 1 to `steps` in it.

    Args:
        store (Store): The store, without a repository.
        steps (int): The number of steps.
        ranks (int): The number of ranks that each step has.
        progress (Callable[[int], None]): Called with the number of each committed step. Default: does nothing.

    Raises:
        UsageError: There is a repository already.
    """
    if repository.read_repo(store) is not None:
        raise UsageError(f"{store.location.url} has a repository already", hint="give an empty directory or prefix")
    repository.ensure_repo(store)
    timeline.open_timeline(store, RUN, None)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="fill") as pool:
        for step in range(1, steps + 1):
            _add(store, step, ranks, pool)
            progress(step)


def add_step(store: Store, step: int, ranks: int) -> None:
    """Commit one more step. The step before it must exist."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="fill") as pool:
        _add(store, step, ranks, pool)


def _add(store: Store, step: int, ranks: int, pool: Executor) -> None:
    summaries = list(pool.map(lambda rank: _write_rank(store, step, rank, ranks), range(ranks)))
    for key, data in closing_objects(RUN, step, attempt_of(step), summaries, _START + _INTERVAL * step):
        store.put(key, data)


def _write_rank(store: Store, step: int, rank: int, ranks: int) -> Summary:
    """Write the pack and the manifest of a rank."""
    payloads = [_bytes([*_changing_elements(step, rank), *own_elements(step, rank)])]
    frozen = _bytes(elements("frozen", step, rank * LENGTH, LENGTH))
    if step == 1:
        payloads.insert(0, frozen)
    entries: list[pack.Entry] = []
    chunks = (pack.NewChunk(digest(payload), payload, len(payload)) for payload in payloads)
    pack.write(store, _pack_name(step, rank).key, chunks, entries.append)
    manifest_of_rank = _manifest(step, rank, ranks, entries[-1], frozen)
    data = manifest.encode(manifest_of_rank)
    store.put(names.manifest(RUN, 1, step, manifest_of_rank.attempt, rank), data)
    return group.summarize(manifest_of_rank, data)


def _changing_elements(step: int, rank: int) -> list[int]:
    """The rank's elements of the sharded tensors that differ in each step."""
    return [value for name in ("weight", "moment") for value in elements(name, step, rank * LENGTH, LENGTH)]


def _bytes(values: Sequence[int]) -> bytes:
    return np.array(values, "<i8").tobytes()


def _pack_name(step: int, rank: int) -> PackName:
    return PackName(attempt_of(step), names.pack_name(rank, _WORKER, 0))


def _manifest(step: int, rank: int, ranks: int, entry: pack.Entry, frozen: bytes) -> Manifest:
    """The manifest of a rank. `entry`: the chunk of this step. The chunk of "frozen" is the first in its pack."""
    packs = tuple(dict.fromkeys((_pack_name(step, rank), _pack_name(1, rank))))
    chunks = (
        Chunk(entry.digest, 0, entry.offset, entry.stored, entry.raw),
        Chunk(digest(frozen), len(packs) - 1, 0, len(frozen), len(frozen)),
    )
    size, deduplicated = entry.raw + len(frozen), len(frozen) if step > 1 else 0
    return Manifest(
        run=RUN,
        timeline=1,
        step=step,
        attempt=attempt_of(step),
        rank=rank,
        world_size=ranks,
        created=float(_START + _INTERVAL * step),
        bases=(Base(1, step - 1, attempt_of(step - 1)),) if step > 1 else (),
        packs=packs,
        chunks=chunks,
        tensors=_tensors(rank, ranks),
        tree=_TREE,
        replicas=_plan_digest(ranks),
        bytes_state=size,
        bytes_written=size - deduplicated,
        bytes_deduplicated=deduplicated,
    )


def _specs(rank: int, ranks: int) -> list[TensorSpec]:
    box = Box((ranks * LENGTH,), (rank * LENGTH,), (LENGTH,))
    rank_local = TensorSpec("own", "int64", whole((len(own_elements(0, rank)),)), False)
    return [*(TensorSpec(name, "int64", box, True) for name in SHARDED), rank_local]


def _tensors(rank: int, ranks: int) -> tuple[Tensor, ...]:
    size = 8 * LENGTH
    spans = {"weight": Span(0, 0, size), "moment": Span(0, size, size), "frozen": Span(1, 0, size)}
    spans["own"] = Span(0, 2 * size, 8 * len(own_elements(0, rank)))
    return tuple(
        Tensor(s.name, s.dtype, s.box.shape, s.box.offset, s.box.local, s.replicated, (spans[s.name],))
        for s in _specs(rank, ranks)
    )


@cache
def _plan_digest(ranks: int) -> bytes:
    """The plan digest of all steps."""
    return group.plan_digest([group.share_digest(_specs(rank, ranks)) for rank in range(ranks)])
