"""Some tensors of a manifest, with the chunks and packs that they need: what one rank of a restore sends to another.

Invariant: an excerpt that `decode` returned is consistent, as a manifest is. Its numbers count the excerpt's own tables.
Failure behaviour: `CorruptionError` for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.manifest import Chunk, Manifest, PackName, Span, Tensor
from headrace.dataio.core.errors import CorruptionError


class Excerpt(msgspec.Struct, array_like=True, frozen=True):
    """Tensors of one manifest, in the order in which they were asked for, and their tables."""

    packs: tuple[PackName, ...]
    chunks: tuple[Chunk, ...]
    tensors: tuple[Tensor, ...]


_decoder = msgspec.msgpack.Decoder(list[Excerpt])


def excerpt(manifest: Manifest, numbers: Iterable[int]) -> Excerpt:
    """The tensors with these numbers in the manifest's table."""
    packs: dict[int, int] = {}
    chunks: dict[int, int] = {}
    tensors = []
    for number in numbers:
        tensor = manifest.tensors[number]
        spans = tuple(Span(chunks.setdefault(s.chunk, len(chunks)), s.start, s.length) for s in tensor.spans)
        tensors.append(msgspec.structs.replace(tensor, spans=spans))
    rows = []
    for chunk in (manifest.chunks[number] for number in chunks):
        rows.append(msgspec.structs.replace(chunk, pack=packs.setdefault(chunk.pack, len(packs))))
    return Excerpt(tuple(manifest.packs[number] for number in packs), tuple(rows), tuple(tensors))


def encode(excerpts: list[Excerpt]) -> bytes:
    return msgspec.msgpack.encode(excerpts)


def decode(data: bytes, sender: int) -> list[Excerpt]:
    """Decode and check the excerpts that the rank `sender` sent."""
    subject = f"rank {sender} sent a damaged excerpt of a manifest"
    try:
        excerpts = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{subject}: {error}") from None
    for rows in excerpts:
        manifests.check_rows(rows, subject)
    return excerpts
