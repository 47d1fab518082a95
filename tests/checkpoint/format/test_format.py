"""The pure parts of the format: names, cuts, layout, the document of Python values, manifests and packs."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.format import chunking, manifest, names, pack
from headrace.checkpoint.format.chunking import (
    ALIGN,
    CHUNK_BYTES,
    FINE_BELOW,
    FINE_CHUNK_BYTES,
    SMALL_BELOW,
    Box,
    TensorSpec,
    bands,
    digest,
    inside,
    pieces,
    whole,
    width,
)
from headrace.checkpoint.format.manifest import Chunk, Manifest, PackName, Span, Tensor
from headrace.checkpoint.saving import plan
from headrace.checkpoint.sharding import assign_writers
from headrace.checkpoint.state import tree
from headrace.dataio.core.errors import CapacityError, CorruptionError, UnsupportedError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store

ATTEMPT = "01HZZZZZZZ0000000000000000"


def test_an_attempt_id_sorts_by_its_time() -> None:
    early, late = names.id_from_bytes(bytes(16)), names.new_id()
    assert early < late
    assert len({names.new_id() for _ in range(1000)}) == 1000
    for bad in ("", late + "0", late.lower(), "8" + late[1:]):
        with pytest.raises(UsageError, match="attempt id"):
            names.check_id(bad)


@given(st.integers(1, 999_999), st.integers(0, names.STEP_LIMIT - 1), st.integers(0, 99_999))
def test_keys_can_be_taken_apart_again(number: int, step: int, rank: int) -> None:
    assert names.parse_step_key(names.commit("r", number, step)) == names.StepKey("r", number, step, "commit")
    key = names.manifest("r", number, step, ATTEMPT, rank)
    assert names.parse_step_key(key) == names.StepKey("r", number, step, "manifest", ATTEMPT, rank)
    assert names.parse_step_key(names.decision("r", number, step, ATTEMPT)) == names.StepKey(
        "r", number, step, "fate", ATTEMPT
    )
    assert names.parse_timeline_key(names.timeline("r", number)) == ("r", number)


@pytest.mark.parametrize("key", ["runs/r/000001/1/COMMIT", "runs/r/x", "runs/r/000001/000000000001/note.txt", ""])
def test_a_strangers_object_is_no_part_of_a_step(key: str) -> None:
    assert names.parse_step_key(key) is None


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "-x", "a" * 129, "a b", "ü"])
def test_a_bad_run_name_is_refused(run: str) -> None:
    with pytest.raises(UsageError, match="name a run"):
        names.check_run(run)


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.0, "1", None])
def test_a_bad_step_is_refused(step: Any) -> None:
    with pytest.raises(UsageError, match="is not a step"):
        names.check_step(step)


@given(st.integers(1, 40), st.integers(1, 3 * MIB), st.data())
def test_pieces_cover_a_shard_once_and_lie_on_the_global_grid(rows: int, width: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    box = Box((rows, width), (first, 0), (count, width))
    found = list(pieces(box, 1))
    assert found[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(found))
    assert sum(n for _, n in found) == count * width
    step = FINE_CHUNK_BYTES if rows * width < FINE_BELOW else CHUNK_BYTES
    assert all((first * width + start) % step == 0 for start, _ in found[1:])
    assert all(n <= step for _, n in found)


def chunks_of(shard: Box, item: int) -> Iterator[tuple[Box, int, int]]:
    """The content of each chunk of a shard, on any rank: the band, and its bytes in a copy of all rows of the band."""
    for band in bands(shard, item):
        row = math.prod(band.local[1:]) * item
        every = Box(band.shape, (0, *band.offset[1:]), (band.shape[0], *band.local[1:]))
        yield from ((every, band.offset[0] * row + start, n) for start, n in pieces(band, item))


def spread(shape: tuple[int, int], dim: int, ranks: int) -> list[Box]:
    """As torch shards a dimension."""
    step = -(-shape[dim] // ranks)
    edges = [min(step * r, shape[dim]) for r in range(ranks + 1)]
    ends = itertools.pairwise(edges)
    return [
        Box(shape, (a, 0), (b - a, shape[1])) if not dim else Box(shape, (0, a), (shape[0], b - a)) for a, b in ends
    ]


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (32000, 4096), (4096, 11008), (1024, 24576)])
@pytest.mark.parametrize("dim", [0, 1])
def test_another_number_of_ranks_keeps_most_chunks_of_rows_and_of_columns(shape: tuple[int, int], dim: int) -> None:
    held = {n: {c for box in spread(shape, dim, n) for c in chunks_of(box, 2)} for n in (8, 16, 6)}
    for ranks in (16, 6):
        again = sum(n for _, _, n in held[8] & held[ranks])
        assert again > 0.8 * math.prod(shape) * 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8]), st.data())
def test_the_bands_of_a_shard_make_it_up_and_its_pieces_cover_them(
    shape: tuple[int, ...], item: int, data: st.DataObject
) -> None:
    shape = tuple(n * data.draw(st.sampled_from([1, 64, 300])) for n in shape)
    edges = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Box(shape, tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
    found = bands(box, item)
    assert sum(math.prod(band.local) for band in found) == math.prod(box.local)
    assert all(not a.overlaps(b) for a, b in itertools.pairwise(found))
    for band in found:
        assert all(part.start >= 0 and part.stop <= n for part, n in zip(inside(band, box), box.local, strict=True))
        ends = [(start, start + n) for start, n in pieces(band, item)]
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends)][: len(ends)]
        assert sum(stop - start for start, stop in ends) == math.prod(band.local) * item


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.sampled_from([1, 2, 4, 8]))
def test_a_tensor_has_few_bands_and_they_are_about_a_chunk(rows: int, columns: int, item: int) -> None:
    step = width((rows, columns), 1, item)
    assert columns / step <= 256 or step * item >= 128
    assert step * rows * item <= max(MIB, rows * columns * item / 128, rows * 256)


SPECS = st.lists(
    st.tuples(
        st.sampled_from(sorted(chunking.ITEM_BYTES)),
        st.lists(st.integers(0, 9), max_size=3) | st.sampled_from([[SMALL_BELOW], [3 * MIB + 5], [SMALL_BELOW - 1]]),
    ),
    max_size=12,
).map(lambda rows: [TensorSpec(f"t{i}", dtype, whole(shape)) for i, (dtype, shape) in enumerate(rows)])


@given(SPECS)
def test_a_layout_never_overlaps_and_its_chunks_give_every_tensor_back(specs: list[TensorSpec]) -> None:
    place = chunking.lay_out(specs)
    assert place == chunking.lay_out(list(specs))
    taken = sorted((at, at + s.nbytes) for at, s in zip(place.offsets, specs, strict=True) if s.nbytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert all(
        at % (chunking.SMALL_ALIGN if chunking.is_small(s.nbytes) else ALIGN) == 0
        for at, s in zip(place.offsets, specs, strict=True)
    )
    cut, spans = chunking.cut_all(specs, place)
    for spec, at, own in zip(specs, place.offsets, spans, strict=True):
        for span in own:
            piece = cut[span.piece]
            assert span.start + span.length <= piece.length
            assert piece.at + span.start == at
            at += span.length
        assert sum(span.length for span in own) == spec.nbytes


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_the_work_of_replicas_is_spread_evenly_and_the_same_on_every_rank(sizes: list[int], world: int) -> None:
    rows = [(f"t{i}", n, range(world)) for i, n in enumerate(sizes)]
    found = assign_writers(rows)
    assert found == assign_writers(reversed(rows))
    load = [sum(n for i, n in enumerate(sizes) if found[f"t{i}"] == rank) for rank in range(world)]
    assert max(load) - min(load) <= max(sizes, default=0)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers()
TREES = st.recursive(
    SCALARS | st.text().map(tree.TensorRef),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | inner.map(lambda x: tree.StatefulNode("other", x))
    ),
    max_leaves=20,
)


@given(TREES)
def test_python_values_come_back_as_they_were(value: object) -> None:
    back = tree.decode(tree.encode(value))
    assert back == value
    assert shape_of(back) == shape_of(value)


def shape_of(value: object) -> object:
    if isinstance(value, tree.StatefulNode):
        return shape_of(value.state)
    if isinstance(value, dict):
        return type(value), [(type(k), shape_of(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(v) for v in value]
    return type(value)


def test_odd_values_come_back_too() -> None:
    back: Any = tree.decode(
        tree.encode({"nan": math.nan, "inf": -math.inf, "zero": -0.0, "c": Counter({3: 2}), "big": -(1 << 90)})
    )
    assert math.isnan(back["nan"])
    assert back["inf"] == -math.inf
    assert math.copysign(1, back["zero"]) == -1
    assert type(back["c"]) is Counter
    assert back["big"] == -(1 << 90)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": object()}}, "a/b"),
        ({"a": [1, {2}]}, "a/1"),
        ({"a": {(1, object()): 3}}, "a/.*"),
        ({"a": {frozenset(): 3}}, "a"),
        ({"s": "\ud800"}, "s"),
        (1 + 0j, None),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(value: object, path: str | None) -> None:
    if path is None:
        assert tree.decode(tree.encode(value)) == value
        return
    with pytest.raises(UsageError, match=f"^{path}: "):
        tree.encode(value)


def test_values_that_are_too_large_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"take 33\.0 MiB, most of them under 'loader'; at most 32\.0 MiB "):
        tree.encode({"a": 1, "loader": bytes(33 * MIB)})


def test_a_manifest_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_BYTES", 100)
    with pytest.raises(CapacityError, match="the manifest of rank 0 would have"):
        manifest.encode(sound_manifest())
    monkeypatch.setattr(manifest, "MAX_RAW_BYTES", 200)
    with pytest.raises(CapacityError, match="at most 200 B"):
        manifest.encode(sound_manifest())


def test_a_large_manifest_is_compressed_and_bounded_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given = msgspec.structs.replace(sound_manifest(), tree=tree.encode({"text": "x" * 9000}))
    assert manifest.decode(manifest.encode(given), KEY) == given  # as it is
    monkeypatch.setattr(manifest, "MAX_BYTES", 2000)
    data = manifest.encode(given)
    assert len(data) <= 2000
    assert msgspec.msgpack.decode(data)["version"] == manifest.WITH_VALUES  # older readers ask for a newer Headrace
    assert msgspec.structs.replace(manifest.decode(data, KEY), version=1) == given
    monkeypatch.setattr(manifest, "MAX_RAW_BYTES", 9000)
    with pytest.raises(CorruptionError, match=r"it would have 9\d\d\d bytes"):
        manifest.decode(data, KEY)
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(CorruptionError, match="not a valid manifest"):
        manifest.decode(msgspec.msgpack.encode({"version": 4, "zstd": frame}), KEY)


def test_values_that_older_readers_do_not_know_raise_the_version_of_the_manifest() -> None:
    assert manifest.version_for([], tree.encode({"a": 1, 2: [3]})) == 1
    for newer in ({"a": tree.ValueNode("range", [1, 2, 1])}, {None: 1}, {(1, "a"): 1}, {1.5: 1}, {True: 2}):
        document = tree.encode(newer)
        assert manifest.version_for([], document) == manifest.WITH_VALUES
        assert tree.decode(document) == newer


def test_a_document_that_is_too_large_is_not_read() -> None:
    with pytest.raises(CorruptionError, match="more than"):
        tree.decode(bytes(tree.MAX_BYTES + 1))
    for few in (b"\xdc\xff\xff" + b"\x90" * 65_535) * 130, b"\x80" * 9 * MIB:
        with pytest.raises(CorruptionError, match="lists and dicts"):
            tree.decode(few)
    assert tree.decode(tree.encode({"text": "x" * 9 * MIB}))


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested deeper"):
        tree.encode(loop)


@given(st.binary(max_size=60))
def test_a_foreign_document_never_gives_more_than_values(data: bytes) -> None:
    with contextlib.suppress(CorruptionError):
        tree.decode(data)


def sound_manifest() -> Manifest:
    chunks = (
        Chunk(digest(b"a"), 0, 0, 100, 100),
        Chunk(digest(b"b"), 0, 4096, 50, 80, manifest.ZSTD),
        Chunk(digest(b"c"), 1, 0, 4, 4),
    )
    tensors = (
        Tensor("w", "float32", (5, 5), (0, 0), (5, 5), True, (Span(0, 0, 100),)),
        Tensor("x", "uint8", (160,), (0,), (84,), True, (Span(1, 0, 80), Span(2, 0, 4))),
        Tensor("empty", "bool", (0, 3), (0, 0), (0, 3), False, ()),
    )
    return Manifest(
        nonce="n",
        run="r",
        timeline=1,
        step=2,
        attempt=ATTEMPT,
        rank=0,
        world_size=2,
        created=1.0,
        bases=(),
        packs=(PackName(ATTEMPT, "0-0badcafe-0"), PackName(ATTEMPT, "0-0badcafe-1")),
        chunks=chunks,
        tensors=tensors,
        tree=tree.encode({}),
        replicas=b"",
        bytes_state=184,
        bytes_written=154,
        bytes_deduplicated=0,
    )


KEY = names.manifest("r", 1, 2, ATTEMPT, 0)


def test_a_manifest_comes_back_as_it_was() -> None:
    data = manifest.encode(sound_manifest())
    assert manifest.decode(data, KEY, digest(data)) == sound_manifest()


@given(st.data())
def test_a_changed_or_cut_manifest_is_never_accepted(data: st.DataObject) -> None:
    good = manifest.encode(sound_manifest())
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    for mutated in (bytes(bad), good[:at], good + b"\0"):
        with pytest.raises(CorruptionError, match="damaged"):
            manifest.decode(mutated, KEY, digest(good))
        with contextlib.suppress(CorruptionError, UnsupportedError):  # without the digest: sound in itself, or refused
            manifest.decode(mutated, KEY)


def changed(**fields: object) -> bytes:
    return manifest.encode(msgspec.structs.replace(sound_manifest(), **fields))


def with_tensor(**fields: object) -> bytes:
    first, *rest = sound_manifest().tensors
    return changed(tensors=(msgspec.structs.replace(first, **fields), *rest))


def with_chunk(**fields: object) -> bytes:
    first, *rest = sound_manifest().chunks
    return changed(chunks=(msgspec.structs.replace(first, **fields), *rest))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (changed(step=3), "another key"),
        (changed(rank=5), "rank 5"),
        (changed(attempt="x"), "not an id"),
        (changed(packs=(PackName(ATTEMPT, "../../x"), PackName(ATTEMPT, "0-0badcafe-1"))), "bad pack name"),
        (changed(packs=()), "names pack 0 of 0"),
        (changed(tensors=sound_manifest().tensors * 2), "listed twice"),
        (changed(chunks=sound_manifest().chunks[:1]), "chunk 1 of 1"),
        (with_chunk(digest=b"short"), "digest"),
        (with_chunk(digest=digest(b"b")), "digest"),
        (with_chunk(raw=0), "impossible sizes"),
        (with_chunk(raw=CHUNK_BYTES + 1, stored=CHUNK_BYTES + 1), "impossible sizes"),
        (with_chunk(raw=101), "two sizes"),
        (with_chunk(codec=9), "unknown codec"),
        (with_chunk(offset=-1), "outside of a pack"),
        (with_chunk(offset=manifest.PACK_BYTES), "outside of a pack"),
        (with_chunk(offset=4090), "overlap"),
        (with_tensor(dtype="float33"), "unknown type"),
        (with_tensor(shape=(5, 6)), None),
        (with_tensor(local=(5, 6)), "outside of the tensor"),
        (with_tensor(offset=(0, 1)), "outside of the tensor"),
        (with_tensor(offset=(0,)), "differ in length"),
        (with_tensor(shape=(1 << 60, 5)), "too large"),
        (with_tensor(spans=()), "spans of 0"),
        (with_tensor(spans=(Span(0, 1, 100),)), "outside of chunk"),
        (with_tensor(spans=(Span(0, 0, 0),)), "outside of chunk"),
        (with_tensor(spans=(Span(-1, 0, 100),)), "chunk -1"),
        (b"", "valid manifest"),
        (b"\x93\x01\x02\x03", "valid manifest"),
    ],
)
def test_an_invalid_manifest_is_refused_by_name(data: bytes, why: str | None) -> None:
    if why is None:  # a smaller shard of a larger tensor is fine
        assert manifest.decode(data, KEY).tensors[0].shape == (5, 6)
        return
    with pytest.raises(CorruptionError, match=why) as caught:
        manifest.decode(data, KEY)
    assert KEY in str(caught.value)


def test_a_manifest_of_a_newer_format_asks_for_a_newer_headrace() -> None:
    with pytest.raises(
        UnsupportedError,
        match=f"format version {manifest.NEWEST + 1}; this Headrace reads versions 1 to {manifest.NEWEST} ",
    ):
        manifest.decode(changed(version=manifest.NEWEST + 1), KEY)


def test_packs_hold_what_was_given_and_split_at_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_BYTES", CHUNK_BYTES + 5 * ALIGN)
    payloads = [bytes([i]) * (3000 + i) for i in range(12)]
    packed: list[tuple[int, pack.Entry]] = []
    with open_store(tmp_path) as store:
        chunks = iter([pack.NewChunk(digest(p), p, len(p)) for p in payloads])
        sizes = list(pack.write_all(store, lambda n: f"packs/{n}", chunks, lambda n, e: packed.append((n, e))))
        assert len(sizes) == 3
        for number in range(3):
            assert store.stat(f"packs/{number}").size == sizes[number]
            assert list(pack.read_table(store, f"packs/{number}")) == [e for n, e in packed if n == number]
        for (number, entry), payload in zip(packed, payloads, strict=True):
            buffer = bytearray(entry.stored)
            store.get_into(f"packs/{number}", entry.offset, memoryview(buffer))
            assert buffer == payload
            assert entry.offset % ALIGN == 0


@pytest.fixture(scope="module")
def a_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    root = tmp_path_factory.mktemp("pack")
    with open_store(root) as store:
        pack.write(
            store,
            "p",
            [pack.NewChunk(digest(b"x" * 50), b"x" * 50, 50), pack.NewChunk(digest(b"y"), b"y", 1)],
            lambda _: None,
        )
    return root, (root / "p").read_bytes()


@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_or_cut_of_a_packs_table_is_found(a_pack: tuple[Path, bytes], data: st.DataObject) -> None:
    root, good = a_pack
    payload_end = 4097
    bad = bytearray(good)
    bad[data.draw(st.integers(payload_end, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    for number, mutated in enumerate((bytes(bad), cut, good + b"\0")):
        (root / f"m{number}").write_bytes(mutated)
        with open_store(root) as store, pytest.raises(CorruptionError, match=f"m{number} is damaged"):
            pack.read_table(store, f"m{number}")


def test_a_plan_that_does_not_fit_its_arena_is_refused() -> None:
    specs = [TensorSpec("a", "float32", whole((4,))), TensorSpec("b", "uint8", whole((SMALL_BELOW,)))]
    place = chunking.lay_out(specs)
    good = plan.PutPlan(
        location=plan.PlanLocation("file:///x", {}), run="r", timeline=1, step=1, attempt=ATTEMPT, rank=0, world_size=1, bases=(),
        tensors=plan.plan_tensors(specs, place), small_bytes=place.small_bytes, tree=b"", replicas=b"",
    )  # fmt: skip
    assert plan.decode(plan.encode(good), place.total) == good
    moved = msgspec.structs.replace(good.tensors[1], at=4097)
    shifted = msgspec.structs.replace(good, tensors=(good.tensors[0], moved))
    huge = msgspec.structs.replace(good, tensors=(msgspec.structs.replace(good.tensors[0], local=(1 << 62,)),))
    for bad in (shifted, huge, msgspec.structs.replace(good, rank=1), msgspec.structs.replace(good, run="../x")):
        with pytest.raises(UsageError):
            plan.decode(plan.encode(bad), place.total)
    with pytest.raises(UsageError, match="layout does not fit"):
        plan.decode(plan.encode(good), place.total - 1)
    with pytest.raises(UsageError, match="cannot be read"):
        plan.decode(plan.encode(good)[:-3], place.total)
    with pytest.raises(UnsupportedError, match="version 2"):
        plan.decode(plan.encode(msgspec.structs.replace(good, version=2)), place.total)
