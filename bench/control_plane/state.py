"""The state whose saves and restores are measured: a model of 405 billion parameters with AdamW.

It has 1,137 parameters in bfloat16. AdamW has two moments in float32 and a step count for each parameter. FSDP shards
all of them over all ranks. Only names, shapes and manifests are made. No tensor is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headrace.checkpoint.format import chunking, group, manifest, names
from headrace.checkpoint.format.chunking import Box, digest, whole
from headrace.checkpoint.format.documents import VERSION, Commit, Decision, Newest, encode
from headrace.checkpoint.format.group import Summary
from headrace.checkpoint.format.manifest import Chunk, Manifest, PackName, Span, Tensor
from headrace.checkpoint.state import tree
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.testing.simulation.store import Bucket

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
    """The shard of a rank, as FSDP divides the first dimension; None for a rank without a shard."""
    step = -(-shape[0] // ranks)
    start = min(rank * step, shape[0])
    size = min(step, shape[0] - start)
    return Box(shape, (start, *(0 for _ in shape[1:])), (size, *shape[1:])) if size else None


class Tables:
    """The tables of one rank's manifest. Small tensors share chunks of 1 MiB. Large ones have their own chunks."""

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
        remaining = manifest.PACK_BYTES - self._at % manifest.PACK_BYTES
        self._at += remaining if remaining < length else 0
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


def document(names: Iterable[str]) -> bytes:
    """The document of a state with these tensors."""
    return tree.encode({"state": {name: tree.TensorRef(name) for name in names}})


DOCUMENT = document(NAMES)


def share_of(rank: int, ranks: int) -> bytes:
    manifest_of_rank = manifest_of(rank, ranks, b"")
    return group.share_digest(chunking.TensorSpec(t.name, t.dtype, t.box, True) for t in manifest_of_rank.tensors)


def save(bucket: Bucket, ranks: int) -> None:
    """Put the committed step into the bucket."""
    plan = group.plan_digest([share_of(rank, ranks) for rank in range(ranks)])
    summaries = []
    for rank in range(ranks):
        manifest_of_rank = manifest_of(rank, ranks, plan)
        data = manifest.encode(manifest_of_rank)
        bucket.objects[names.manifest(RUN, 1, 1, ATTEMPT, rank)] = data, 0.0
        summaries.append(group.summarize(manifest_of_rank, data))
    for key, data in closing_objects(RUN, 1, ATTEMPT, summaries):
        bucket.apply_put(key, data)


def closing_objects(
    run: str, step: int, attempt: str, summaries: Sequence[Summary], committed: float = 0.0
) -> Iterator[tuple[str, bytes]]:
    """The objects that a commit in timeline 1 writes after the manifests: groups, decision, COMMIT, `newest.json`.

    Args:
        run (str): The run.
        step (int): The step.
        attempt (str): The id of the attempt.
        summaries (Sequence[Summary]): The summaries of all manifests, by rank.
        committed (float): The time of the commit, in seconds since the epoch. Default: 0.

    Returns:
        Iterator[tuple[str, bytes]]: Key and content of each object, in the order in which they are written.
    """
    ranks = len(summaries)
    is_grouped = names.is_grouped(ranks)
    parts = [names.ranks_of_group(g, ranks) for g in range(names.group_count(ranks))] if is_grouped else [range(ranks)]
    tally, digests = group.Tally(attempt, ranks), list[str]()
    for index, members in enumerate(parts):
        joined = group.join(attempt, index, ranks, [summaries[rank] for rank in members])
        tally.add(joined)
        if is_grouped:
            data = group.encode(joined)
            yield names.group(run, 1, step, attempt, index), data
            digests.append(digest(data).hex())
    decision = Decision(
        version=Decision.newest if is_grouped else VERSION,
        attempt=attempt,
        outcome="commit",
        manifests=() if is_grouped else tuple(summary.member.manifest.hex() for summary in summaries),
        groups=tuple(digests),
        world_size=ranks if is_grouped else 0,
        group_ranks=names.GROUP_RANKS if is_grouped else 0,
        totals=tally.totals(),
    )
    yield names.decision(run, 1, step, attempt), encode(decision)
    yield names.commit(run, 1, step), encode(Commit(step=step, attempt=attempt, committed=committed))
    yield names.newest(run, 1), encode(Newest(step=step))


def boxes_of(rank: int, ranks: int) -> Iterator[tuple[str, Box]]:
    for name, shape in PARAMETERS:
        if (box := box_of(shape, rank, ranks)) is not None:
            yield from ((f"{slot}/{name}", box) for slot, _ in SLOTS)
        yield f"step/{name}", whole(())
