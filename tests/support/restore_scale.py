"""Measures how the ranks of a large job find what they restore: `python -m tests.support.restore_scale SAVED RESTORING`.

The state has the shape of a model of 405 billion parameters with AdamW: 1,137 parameters in bfloat16, two moments in
float32, and a step count, spread by FSDP over all ranks. All ranks run the real code, in one process and in virtual time,
up to the list of chunks that each reads. The store answers after 20 ms. Three parts are left out: the search for the
step, the comparison with tensors in memory, and the reading of packs.

It prints the requests of all ranks to the store, the CPU seconds of the ranks, and the memory of the process for each
rank at its peak. The memory includes the messages in flight.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from collections.abc import Iterator
from functools import partial
from unittest import mock

from headrace.checkpoint.format import chunking, group, manifest, names
from headrace.checkpoint.format.chunking import Box, digest, whole
from headrace.checkpoint.format.documents import Base, Commit, Decision, encode
from headrace.checkpoint.format.manifest import Chunk, Manifest, PackName, Span, Tensor
from headrace.checkpoint.repository import fetch, lease
from headrace.checkpoint.restoring import chunk_homes, divided_step
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, StepLease, Want
from headrace.checkpoint.restoring.opening import open_found, read_decision
from headrace.checkpoint.restoring.shared_reads import _needed_by_several
from headrace.checkpoint.state import tree
from headrace.checkpoint.tier.restoring import Found
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Process, Simulation
from headrace.dataio.testing.simulation.store import Bucket, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched

RUN, ATTEMPT = "exp", names.new_id()
LAYERS, DIM, HIDDEN, WORDS, KEYS = 126, 16_384, 53_248, 128_256, 1_024
SMALL_BELOW = 64 * KIB
SLOTS = (("weight", "bfloat16"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))


def parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the parameters."""
    yield "embed.weight", (WORDS, DIM)
    for layer in range(LAYERS):
        for name, shape in (
            ("wq", (DIM, DIM)),
            ("wk", (KEYS, DIM)),
            ("wv", (KEYS, DIM)),
            ("wo", (DIM, DIM)),
            ("w1", (HIDDEN, DIM)),
            ("w2", (DIM, HIDDEN)),
            ("w3", (HIDDEN, DIM)),
            ("attention_norm", (DIM,)),
            ("ffn_norm", (DIM,)),
        ):
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", (DIM,)
    yield "output.weight", (WORDS, DIM)


PARAMETERS = list(parameters())


def box_of(shape: tuple[int, ...], rank: int, ranks: int) -> Box | None:
    """The part of a rank, as FSDP cuts the first dimension; None for a rank without a part."""
    step = -(-shape[0] // ranks)
    start = min(rank * step, shape[0])
    size = min(step, shape[0] - start)
    return Box(shape, (start, *(0 for _ in shape[1:])), (size, *shape[1:])) if size else None


class Tables:
    """The tables of one rank's manifest: small tensors share chunks of a mebibyte, large ones have their own chunks."""

    def __init__(self, rank: int) -> None:
        self._rank, self._small, self._used, self._at = rank, -1, MIB, 0
        self.chunks: list[Chunk] = []

    def spans(self, size: int) -> tuple[Span, ...]:
        if size >= SMALL_BELOW:
            return tuple(Span(self._new(length), 0, length) for _, length in chunking.cut(size, 4 * MIB))
        if self._used + size > MIB:
            self._small, self._used = self._new(MIB), 0
        self._used += size
        return (Span(self._small, self._used - size, size),)

    def _new(self, length: int) -> int:
        """The number of a new chunk, in the next pack if this one is full."""
        left = manifest.PACK_BYTES - self._at % manifest.PACK_BYTES
        self._at += left if left < length else 0
        pack, offset = divmod(self._at, manifest.PACK_BYTES)
        number, self._at = len(self.chunks), self._at + length
        self.chunks.append(Chunk(digest(b"%d %d" % (self._rank, number)), pack, offset, length, length))
        return number

    def packs(self) -> tuple[PackName, ...]:
        count = self._at // manifest.PACK_BYTES + 1
        return tuple(PackName(ATTEMPT, f"{self._rank}-00000000-{number}") for number in range(count))


def manifest_of(rank: int, ranks: int, plan: bytes) -> Manifest:
    """The manifest of a rank. The step counts are divided among the ranks."""
    tables, tensors = Tables(rank), []
    for name, shape in PARAMETERS:
        if (box := box_of(shape, rank, ranks)) is None:
            continue
        for slot, dtype in SLOTS:
            spans = tables.spans(chunking.nbytes(dtype, box.local))
            tensors.append(Tensor(f"{slot}/{name}", dtype, shape, box.offset, box.local, True, spans))
    for number, (name, _) in enumerate(PARAMETERS):
        if number % ranks == rank:
            tensors.append(Tensor(f"step/{name}", "float32", (), (), (), True, tables.spans(4)))
    return Manifest(
        run=RUN,
        timeline=1,
        step=1,
        attempt=ATTEMPT,
        rank=rank,
        world_size=ranks,
        created=0.0,
        bases=(),
        packs=tables.packs(),
        chunks=tuple(tables.chunks),
        tensors=tuple(tensors),
        tree=DOCUMENT,
        replicas=plan,
        bytes_state=0,
        bytes_written=0,
        bytes_deduplicated=0,
    )


NAMES = [f"{slot}/{name}" for slot in ("weight", "exp_avg", "exp_avg_sq", "step") for name, _ in PARAMETERS]
DOCUMENT = tree.encode({"state": {name: tree.TensorRef(name) for name in NAMES}})


def share_of(rank: int, ranks: int) -> bytes:
    found = manifest_of(rank, ranks, b"")
    return group.share_digest(chunking.TensorSpec(t.name, t.dtype, t.box, True) for t in found.tensors)


def save(bucket: Bucket, ranks: int) -> None:
    """Put the committed step into the bucket."""
    plan = group.plan_digest([share_of(rank, ranks) for rank in range(ranks)])
    summaries = []
    for rank in range(ranks):
        found = manifest_of(rank, ranks, plan)
        data = manifest.encode(found)
        bucket.objects[names.manifest(RUN, 1, 1, ATTEMPT, rank)] = data, 0.0
        summaries.append(group.summarize(found, data))
    document = Decision(attempt=ATTEMPT, outcome="commit", manifests=tuple(s.member.manifest.hex() for s in summaries))
    if names.is_grouped(ranks):
        digests = []
        for index in range(names.group_count(ranks)):
            members = [summaries[rank] for rank in names.ranks_of_group(index, ranks)]
            data = group.encode(group.join(ATTEMPT, index, ranks, members))
            bucket.objects[names.group(RUN, 1, 1, ATTEMPT, index)] = data, 0.0
            digests.append(digest(data).hex())
        document = Decision(
            version=2,
            attempt=ATTEMPT,
            outcome="commit",
            groups=tuple(digests),
            world_size=ranks,
            group_ranks=names.GROUP_RANKS,
        )
    bucket.apply_put(names.decision(RUN, 1, 1, ATTEMPT), encode(document))
    bucket.apply_put(names.commit(RUN, 1, 1), encode(Commit(step=1, attempt=ATTEMPT)))


class NoSink:
    """Memory that is never filled."""

    def open(self) -> memoryview:
        raise AssertionError("nothing is read")

    def close(self) -> None:
        pass


def restore(store: SimulatedStore, ranks: SimulatedRanks, clock: object) -> int:
    """One rank, up to the list of its chunks; their number."""
    base = Base(1, 1, ATTEMPT)
    with StepLease(store, RUN, base, clock, writes=ranks.rank == 0):  # type: ignore[arg-type]
        found = open_found(RUN, 1, lambda: (Found(base), read_decision(store, RUN, base)), ranks)
        assert found is not None
        opened = divided_step.open_divided(store, found[1], ranks)
        document = tree.decode(opened.own.tree)
        types = opened.types(list(tree.tensor_names(document)))
        boxes = {name: [box] for name, box in _boxes(ranks.rank, ranks.world_size)}
        saved = opened.tensors(types, boxes)
        wants = [Want(saved[name], box, NoSink()) for name, its in boxes.items() for box in its]
        reading = ChunkReader(fetch.Step(RUN, base, ()), wants)
        chunk_homes.find_routes([(), _needed_by_several(reading)], ranks)
        with ranks.agreed():
            return len(reading.needed())


def _boxes(rank: int, ranks: int) -> Iterator[tuple[str, Box]]:
    for name, shape in PARAMETERS:
        if (box := box_of(shape, rank, ranks)) is not None:
            yield from ((f"{slot}/{name}", box) for slot, _ in SLOTS)
        yield f"step/{name}", whole(())


def measure(saved: int, restoring: int) -> dict[str, float]:
    """Requests of all ranks, and CPU seconds and MiB of one rank, as a mean over the ranks."""
    simulation = Simulation(1, measure_cpu=True)
    bucket = Bucket(simulation, latency=0.02)
    save(bucket, saved)
    store, ranks_of = SimulatedStore(bucket), Group(simulation, restoring)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    processes = [Process(str(rank)) for rank in range(restoring)]
    gc.disable()  # as the restorer does
    with patched(simulation, lease, fetch), mock.patch.object(divided_step, "WHOLE_RANKS", 0):
        tasks = [
            simulation.start(
                partial(restore, store, SimulatedRanks(ranks_of, rank), simulation.clock), process=processes[rank]
            )
            for rank in range(restoring)
        ]
        simulation.run()
    errors = [task.error for task in tasks if task.error is not None]
    if errors:
        raise errors[0]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = [process.cpu for process in processes]
    return {
        "saved": saved,
        "restoring": restoring,
        "requests": sum(bucket.requests.values()),
        "cpu_seconds": round(sum(cpu) / len(cpu), 3),
        "mib_per_rank": round((after - before) / KIB / restoring, 1),
        "most_mib_received_at_once": round(ranks_of.bytes / MIB, 1),
        "virtual_seconds": round(simulation.now, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
