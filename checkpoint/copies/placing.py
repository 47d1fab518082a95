"""Builds the manifest of a copied rank: where each chunk is at the destination, and which chunks must be copied.

A chunk may be at the destination already, in a step of the run (`ChunkIndex`), or in a pack that an earlier copier of the
same attempt completed. All others are copied. Chunks keep their numbers, so the tensors' spans do not change.
Invariant: a difference is referenced only together with the place of its base that the difference names. A chunk has one
place in a manifest, and the base of a difference is never a difference.
Failure behaviour: none of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.checkpoint.copies.chunks import with_pack
from headrace.checkpoint.copies.index import ChunkIndex
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import DELTAS, Chunk, Manifest, PackName
from headrace.checkpoint.saving.dedup import Stored
from headrace.dataio.store.base import Store


@dataclass(slots=True)
class Placing:
    """The places of a manifest's chunks at the destination, by digest, and the chunks to copy.

    `bases`: the steps of the destination whose chunks are referenced. `plain`, `differences`: chunks to copy, by number.
    `base_of`: for each difference to copy, the digest of its base.
    """

    places: dict[bytes, Stored] = field(default_factory=dict)
    bases: set[Base] = field(default_factory=set)
    plain: list[int] = field(default_factory=list)
    differences: list[int] = field(default_factory=list)
    base_of: dict[bytes, bytes] = field(default_factory=dict)


def place(manifest: Manifest, index: ChunkIndex, own: Mapping[bytes, Stored], store: Store) -> Placing:
    """Find the chunks of a manifest at the destination. `own`: chunks in packs of the attempt itself."""
    found = Placing()
    known = {chunk.digest: hit for chunk in manifest.chunks if (hit := index.get(chunk.digest)) is not None}
    sparse = index.sparse_packs(store, [stored for stored, _ in known.values()])
    known = {digest: hit for digest, hit in known.items() if not {hit[0].pack, hit[0].whole.pack} & sparse}
    links = {manifest.chunks[chunk].digest: manifest.chunks[base].digest for chunk, base in manifest.links}
    must_be_plain = set(links.values())
    for digest in _differences_first(manifest, known):
        hit = known[digest]
        if digest in must_be_plain and hit[0].base is not None:
            continue
        if _fits(hit[0], found.places):
            _use(hit, found)
    for number, chunk in enumerate(manifest.chunks):
        if chunk.digest in found.places:
            continue
        if chunk.digest in own:
            found.places[chunk.digest] = own[chunk.digest]
        elif chunk.codec in DELTAS:
            found.differences.append(number)
            found.base_of[chunk.digest] = links[chunk.digest]
        else:
            found.plain.append(number)
    return found


def _differences_first(manifest: Manifest, known: Mapping[bytes, tuple[Stored, Base]]) -> list[bytes]:
    """Digests of the known chunks: first differences, because they determine the places of their bases."""
    digests = [chunk.digest for chunk in manifest.chunks if chunk.digest in known]
    return sorted(digests, key=lambda digest: known[digest][0].base is None)


def _fits(stored: Stored, places: Mapping[bytes, Stored]) -> bool:
    """Whether neither the chunk nor its base has another place already."""
    return all(
        each.chunk.digest not in places or _same(places[each.chunk.digest], each) for each in (stored, stored.whole)
    )


def _same(one: Stored, other: Stored) -> bool:
    return (one.pack, one.chunk.offset, one.chunk.codec) == (other.pack, other.chunk.offset, other.chunk.codec)


def _use(hit: tuple[Stored, Base], found: Placing) -> None:
    stored, base = hit
    found.places[stored.chunk.digest] = stored
    found.places[stored.whole.chunk.digest] = stored.whole
    found.bases.add(base)


def build(
    manifest: Manifest,
    places: Mapping[bytes, Stored],
    *,
    run: str,
    attempt: str,
    bases: tuple[Base, ...],
) -> Manifest:
    """The manifest of the copy. `places`: of all chunks that the manifest needs, by digest."""
    packs: dict[PackName, int] = {}
    rows: list[Chunk] = []
    number: dict[bytes, int] = {}

    def add(stored: Stored) -> None:
        number[stored.chunk.digest] = len(rows)
        rows.append(with_pack(stored.chunk, packs.setdefault(stored.pack, len(packs))))

    for chunk in manifest.chunks:
        add(places[chunk.digest])
    links = []
    for chunk in manifest.chunks:
        stored = places[chunk.digest]
        if stored.base is not None:
            if stored.base.chunk.digest not in number:
                add(stored.base)
            links.append((number[chunk.digest], number[stored.base.chunk.digest]))
    written = sum(row.stored for row, _ in _own(rows, packs, attempt))
    return replace(
        manifest,
        version=manifests.version_for((row.codec for row in rows), manifest.tree),
        nonce=names.new_id(),
        run=run,
        attempt=attempt,
        bases=bases,
        packs=tuple(packs),
        chunks=tuple(rows),
        bytes_written=written,
        bytes_deduplicated=sum(row.raw for row in rows) - sum(row.raw for row, _ in _own(rows, packs, attempt)),
        links=tuple(links),
    )


def _own(rows: list[Chunk], packs: Mapping[PackName, int], attempt: str) -> list[tuple[Chunk, PackName]]:
    """The rows in packs of the attempt itself."""
    names_by_number = list(packs)
    return [(row, names_by_number[row.pack]) for row in rows if names_by_number[row.pack].attempt == attempt]
