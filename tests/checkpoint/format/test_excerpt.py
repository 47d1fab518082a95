"""An excerpt holds the rows of a manifest that were asked for, and is checked like a manifest."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from headrace.checkpoint.format import excerpt, names
from headrace.checkpoint.format.manifest import Chunk, Manifest, PackName, Span, Tensor
from headrace.dataio.core.errors import CorruptionError

PACKS = tuple(PackName(names.new_id(), f"{number}-00000000-0") for number in range(3))


def manifest() -> Manifest:
    chunks = tuple(Chunk(bytes([number]) * 32, number % 3, 100 * number, 100, 100) for number in range(6))
    spans = [(Span(0, 0, 60),), (Span(4, 0, 100), Span(1, 20, 20)), (Span(1, 0, 10),)]
    tensors = tuple(
        Tensor(f"t{number}", "uint8", (size,), (0,), (size,), True, its)
        for number, (size, its) in enumerate(zip((60, 120, 10), spans, strict=True))
    )
    return Manifest(
        run="exp",
        timeline=1,
        step=1,
        attempt=names.new_id(),
        rank=0,
        world_size=1,
        created=0.0,
        bases=(),
        packs=PACKS,
        chunks=chunks,
        tensors=tensors,
        tree=b"",
        replicas=b"",
        bytes_state=0,
        bytes_written=0,
        bytes_deduplicated=0,
    )


def test_an_excerpt_keeps_the_chunks_of_its_tensors_and_nothing_else() -> None:
    whole = manifest()
    part = excerpt.excerpt(whole, [2, 1])
    assert excerpt.decode(excerpt.encode([part]), 7) == [part]
    assert [t.name for t in part.tensors] == ["t2", "t1"]
    assert len(part.chunks) == 2
    for tensor in part.tensors:
        original = next(t for t in whole.tensors if t.name == tensor.name)
        for span, before in zip(tensor.spans, original.spans, strict=True):
            chunk, other = part.chunks[span.chunk], whole.chunks[before.chunk]
            assert (span.start, span.length) == (before.start, before.length)
            assert structs.replace(chunk, pack=0) == structs.replace(other, pack=0)
            assert part.packs[chunk.pack] == whole.packs[other.pack]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        excerpt.encode([structs.replace(excerpt.excerpt(manifest(), [0]), chunks=())]),
        excerpt.encode([structs.replace(excerpt.excerpt(manifest(), [0]), packs=(PackName("../x", "0-00000000-0"),))]),
        excerpt.encode([structs.replace(excerpt.excerpt(manifest(), [0, 1]), packs=PACKS[:1])]),
    ],
    ids=["empty", "no msgpack", "another type", "no chunks", "another folder", "a pack is missing"],
)
def test_a_damaged_excerpt_is_refused_with_its_sender(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="rank 7 sent a damaged excerpt"):
        excerpt.decode(data, 7)
