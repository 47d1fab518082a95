"""Measures the restore of one rank of a job of any size: `python -m headrace.bench.control_plane.one_rank RANKS`.

The layout is the same as that of the saving job. The rank is the home of more tensors than any other. It runs the real
code. The messages that the other ranks would send to it are made here, and their making does not count.
`headrace.bench.control_plane.restore` runs all ranks, so the two can be compared at sizes that both can handle.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import msgspec
from msgspec import structs

from headrace.bench.control_plane import state
from headrace.bench.control_plane.restore import NoSink
from headrace.bench.control_plane.state import ATTEMPT, NAMES, PARAMETERS, RUN, SLOTS, box_of, boxes_of, manifest_of
from headrace.checkpoint.format import excerpt, group, manifest, names
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.restoring import chunk_homes, divided_step, tensor_homes
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, Want
from headrace.checkpoint.restoring.divided_step import _FromGroups, _Member, _rows_decoder
from headrace.checkpoint.restoring.shared_reads import _needed_by_several
from headrace.checkpoint.restoring.tensor_homes import Answer, HeldTensor, Request, ShardPlace
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.home_plan import home_of
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.testing.simulation.scheduler import Simulation
from headrace.dataio.testing.simulation.store import Bucket, SimulatedStore

Messages = dict[int, bytes]
encode = msgspec.msgpack.encode


class OtherRanks:
    """The collective operations of one rank; the messages of the others are made by `_received`."""

    def __init__(self, rank: int, world_size: int, manifest: Manifest, member: _Member) -> None:
        self.rank, self.world_size, self._manifest, self._member = rank, world_size, manifest, member
        self.seconds, self.bytes = 0.0, 0
        self._stages = iter(
            (
                self._groups,
                self._places,
                self._names,
                self._types,
                self._requests,
                self._answers,
                self._rows,
                self._excerpts,
                self._needs,
                self._steps,
            )
        )
        self._homed = [name for name in NAMES if home_of(name, world_size) == rank]
        self._row = {t.name: number for number, t in enumerate(manifest.tensors)}
        self._sharded = [
            (f"{slot}/{name}", dtype, shape)
            for slot, dtype in SLOTS
            for name, shape in PARAMETERS
            if f"{slot}/{name}" in self._homed
        ]
        self._counts = [name for name in self._homed if name.startswith("step/")]

    def agree(self, number: int, message: bytes, error: Exception | None, alike: object = ()) -> bytes:
        if error is not None:
            raise error
        return message

    @contextlib.contextmanager
    def agreed(self, number: int = 0, alike: object = ()) -> Iterator[None]:
        yield

    def maximum(self, sent: bytes) -> bytes:
        return sent

    def all_to_all(self, sent: Mapping[int, bytes]) -> Messages:
        began = time.process_time()
        received = next(self._stages)(sent)
        self.bytes = max(self.bytes, sum(map(len, received.values())))
        self.seconds += time.process_time() - began
        return received

    def _from_others(self, make: Callable[[int], list[object]]) -> Messages:
        """A message of each other rank: its items, if it has any."""
        items_by_rank = ((rank, make(rank)) for rank in range(self.world_size) if rank != self.rank)
        return {rank: encode(items) for rank, items in items_by_rank if items}

    def _groups(self, sent: Mapping[int, bytes]) -> Messages:
        return {self.rank // names.GROUP_RANKS: encode(_FromGroups([self._member]))}

    def _places(self, sent: Mapping[int, bytes]) -> Messages:
        def tensors_of(rank: int) -> list[object]:
            tensors: list[object] = []
            for name, dtype, shape in self._sharded:
                if (box := box_of(shape, rank, self.world_size)) is not None:
                    tensors.append(HeldTensor(name, dtype, shape, [ShardPlace(rank, 0, box.offset, box.local)]))
            for name in self._counts:
                if holder(name, self.world_size) == rank:
                    tensors.append(HeldTensor(name, "float32", (), [ShardPlace(rank, 0, (), ())]))
            return tensors

        return self._from_others(tensors_of) | ({self.rank: sent[self.rank]} if self.rank in sent else {})

    def _names(self, sent: Mapping[int, bytes]) -> Messages:
        def lacking(rank: int) -> list[object]:
            counts = [name for name in self._counts if holder(name, self.world_size) != rank]
            return [
                *counts,
                *(name for name, _, shape in self._sharded if box_of(shape, rank, self.world_size) is None),
            ]

        self._asked_names = {home: tensor_homes._names_decoder.decode(data) for home, data in sent.items()}
        return self._from_others(lacking)

    def _types(self, sent: Mapping[int, bytes]) -> Messages:
        return {home: encode([TYPES[name] for name in its]) for home, its in self._asked_names.items()}

    def _requests(self, sent: Mapping[int, bytes]) -> Messages:
        def requests_of(rank: int) -> list[object]:
            boxes = [(name, box_of(shape, rank, self.world_size)) for name, _, shape in self._sharded]
            requests: list[object] = [
                Request(name, [(box.offset, box.local)]) for name, box in boxes if box is not None
            ]
            return requests + [Request(name, [((), ())]) for name in self._counts]

        self._asked_shards = {home: tensor_homes._requests_decoder.decode(data) for home, data in sent.items()}
        return self._from_others(requests_of)

    def _answers(self, sent: Mapping[int, bytes]) -> Messages:
        return {home: encode([self._answer(each.name) for each in its]) for home, its in self._asked_shards.items()}

    def _answer(self, name: str) -> Answer:
        if name.startswith("step/"):
            owner = holder(name, self.world_size)
            return Answer(
                [(owner, self._row[name] if owner == self.rank else _holders[name] // self.world_size)], False
            )
        return Answer([(self.rank, self._row[name])], True)

    def _rows(self, sent: Mapping[int, bytes]) -> Messages:
        self._asked_rows = {reader: _rows_decoder.decode(data) for reader, data in sent.items()}
        rows = [self._row[name] for name in NAMES if name.startswith("step/") and name in self._row]
        return self._from_others(lambda rank: [(self.rank, rows)] if rows else [])

    def _excerpts(self, sent: Mapping[int, bytes]) -> Messages:
        return {reader: encode([self._excerpt(*each) for each in its]) for reader, its in self._asked_rows.items()}

    def _excerpt(self, owner: int, rows: list[int]) -> excerpt.Excerpt:
        return excerpt.excerpt(small(owner, self.world_size), rows)

    def _needs(self, sent: Mapping[int, bytes]) -> Messages:
        self._asked_chunks = {home: msgspec.msgpack.decode(data, type=list[bytes]) for home, data in sent.items()}
        common = [self._id(rank) for rank in range(min(len(PARAMETERS), self.world_size))]
        common_ids = b"".join(each for each, home in common if home == self.rank)

        def ids_of(rank: int) -> list[object]:
            id_of_rank, home = self._id(rank)
            more = id_of_rank if home == self.rank and rank >= len(PARAMETERS) else b""
            return [b"", common_ids + more] if common_ids or more else []

        return self._from_others(ids_of)

    def _steps(self, sent: Mapping[int, bytes]) -> Messages:
        step = chunk_homes._STEP.pack(0, 1, 2)
        return {
            home: encode([step * (len(part) // chunk_homes._ID.size) for part in parts])
            for home, parts in self._asked_chunks.items()
        }

    def _id(self, rank: int) -> tuple[bytes, int]:
        manifest_of_rank = small(rank, self.world_size)
        place = chunk_homes._by_home([(manifest_of_rank.packs[0].key, manifest_of_rank.chunks[0])], self.world_size)
        return next((its[0][0], home) for home, its in place.items())


TYPES = {f"{slot}/{name}": (dtype, shape) for slot, dtype in SLOTS for name, shape in PARAMETERS}
TYPES |= {f"step/{name}": ("float32", ()) for name, _ in PARAMETERS}
_holders = {f"step/{name}": number for number, (name, _) in enumerate(PARAMETERS)}
_small: dict[int, Manifest] = {}
NO_COUNTS = manifest.Chunk(bytes(32), 0, 0, MIB, MIB)
"""The small chunk of a rank without step counts."""


def holder(name: str, ranks: int) -> int:
    """The rank that has saved a step count."""
    return _holders[name] % ranks


def small(rank: int, ranks: int) -> Manifest:
    """A manifest of the step counts of one rank, with its small chunk."""
    if rank not in _small:
        with mock.patch.object(state, "SLOTS", ()):
            manifest_of_rank = manifest_of(rank, ranks, b"")
            _small[rank] = (
                manifest_of_rank if manifest_of_rank.chunks else structs.replace(manifest_of_rank, chunks=(NO_COUNTS,))
            )
    return _small[rank]


def measure(ranks: int) -> dict[str, float]:
    counts = Counter(home_of(name, ranks) for name in NAMES)
    groups = names.group_count(ranks)
    rank, homed = max(((r, n) for r, n in counts.items() if r >= groups), key=lambda each: each[1])
    plan = bytes(32)
    own_manifest = manifest_of(rank, ranks, plan)
    data = manifest.encode(own_manifest)
    for other_rank in range(ranks):
        small(other_rank, ranks)
    attempt, bucket = Attempt(RUN, 1, 1, ATTEMPT, ranks), Bucket(Simulation())
    bucket.apply_put(attempt.manifest_key(rank), data)
    store = SimulatedStore(bucket)
    sealed = fetch.Sealed(RUN, Base(1, 1, ATTEMPT), attempt, (), (bytes(32),) * groups, names.GROUP_RANKS)
    member = _Member(rank, digest(data), group.summarize(own_manifest, data).member.share, plan)
    others = OtherRanks(rank, ranks, own_manifest, member)
    boxes = {name: [box] for name, box in boxes_of(rank, ranks)}
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    opened = divided_step.open_divided(store, sealed, others)
    types = opened.types(list(tree.tensor_names(tree.decode(opened.own.tree))))
    saved = opened.tensors(types, boxes)
    reading = ChunkReader(
        fetch.Step(RUN, sealed.base, ()), [Want(saved[n], its[0], NoSink()) for n, its in boxes.items()]
    )
    chunk_homes.find_routes([(), _needed_by_several(reading)], others)
    seconds = time.process_time() - began - others.seconds
    return {
        "ranks": ranks,
        "tensors_of_home": homed,
        "requests": sum(bucket.requests.values()),
        "cpu_seconds": round(seconds, 3),
        "mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / KIB, 1),
        "most_mib_received_at_once": round(others.bytes / KIB / KIB, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
