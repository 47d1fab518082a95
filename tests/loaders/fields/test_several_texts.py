"""`Text` of a JSON file: which of several captions a sample has in each epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio import pack
from headrace.dataio.core.errors import CorruptionError, MissingValueError, UnsupportedError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.messages import TEXT_BYTES
from headrace.dataio.shards.media.text_members import text_of
from headrace.loaders.field_loader import Loader
from headrace.loaders.fields.text import Text
from tests.support.batches import take
from tests.support.field_input import input_of, sample_of
from tests.support.written_media import write_wav

RANDOM = Text(path="captions", choose="random")


def value(field: Text, document: Any, epoch: int = 0, **more: Any) -> str | None:
    given_input = input_of({str(field.file): json.dumps(document, ensure_ascii=False).encode()})
    return field.decode(replace(given_input, ref=replace(given_input.ref, epoch=epoch, **more)))


def drawn(field: Text, document: Any, epochs: int = 200) -> Counter[str | None]:
    return Counter(value(field, document, epoch) for epoch in range(epochs))


def test_a_path_is_read_from_the_json() -> None:
    field = Text(path="meta.captions")
    assert (field.files, field.collate, field.uses_caption) == (("json",), "list", False)
    assert (Text().uses_caption, Text(file="txt").uses_caption) == (True, False)
    assert Text(path="a", file=".meta.json").files == ("meta.json",)
    assert value(field, {"meta": {"captions": [" ", " a dog\n", "b"]}}) == "a dog"
    assert value(field, {"meta": {"captions": " a dog\n"}}) == "a dog"
    assert value(Text(path="tracks[1].label"), {"tracks": [{}, {"label": "cat"}]}) == "cat"
    assert Text(path="a").nbytes(sample_of({"json": bytes(10)})) == 300


def test_a_random_text_is_another_one_in_other_epochs_and_all_occur() -> None:
    counts = drawn(RANDOM, {"captions": ["a", "", "b", " c "]}, 600)
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) > 150
    assert [value(RANDOM, {"captions": ["a", "b"]}, n) for n in range(20)] == [
        value(RANDOM, {"captions": ["a", "b"]}, n) for n in range(20)
    ]
    assert drawn(RANDOM, {"captions": "one"}, 3) == {"one": 3}
    by_seed = {tuple(value(RANDOM, {"captions": ["a", "b"]}, n, seed=s) for n in range(20)) for s in range(4)}
    assert len(by_seed) == 4


def test_fields_of_the_same_lengths_choose_the_same_position() -> None:
    document = {"captions": list("abcde"), "titles": list("ABCDE")}
    titles = Text(path="titles", choose="random")
    for epoch in range(20):
        assert str(value(RANDOM, document, epoch)).upper() == value(titles, document, epoch)


def test_weights_are_the_chances_of_the_texts() -> None:
    field = Text(path="captions", choose="random", weights="scores")
    counts = drawn(field, {"captions": ["a", "b", "c", "", "d"], "scores": [1, 0, 2.5, 99, 0.5]}, 800)
    assert set(counts) == {"a", "c", "d"}
    assert counts["c"] > 400
    assert 120 < counts["a"] < 280
    assert drawn(field, {"captions": ["a", "b"], "scores": [0, 1e-300]}, 5) == {"b": 5}
    assert drawn(field, {"captions": "a", "scores": 3}, 2) == {"a": 2}
    equal = {"captions": list("abc"), "scores": [1, 1, 1]}
    assert all(value(field, equal, epoch) == value(RANDOM, equal, epoch) for epoch in range(50))


@pytest.mark.parametrize(
    "scores",
    [[1], [1, 2, 3], [0, 0], [1, -1], [1, None], ["1", 2], [True, 1], 5, None, {}, [[1, 2]], [1e308, 1e308], []],
)
def test_impossible_weights_are_damage(scores: Any) -> None:
    field = Text(path="captions", choose="random", weights="scores", required=False)
    with pytest.raises(CorruptionError, match=r"'scores' in \.json"):
        value(field, {"captions": ["a", "b"], "scores": scores})
    with pytest.raises(CorruptionError, match="has no 'scores'"):
        value(field, {"captions": ["a", "b"]})


@pytest.mark.parametrize("captions", [3, 0.5, True, {"en": "a"}, ["a", 1], ["a", None], [["a"]]])
@pytest.mark.parametrize("field", [Text(path="captions"), RANDOM, Text(path="captions", required=False)])
def test_captions_of_another_type_are_damage(field: Text, captions: Any) -> None:
    with pytest.raises(CorruptionError, match=r"'captions' in \.json is not a text or a list of texts: it has"):
        value(field, {"captions": captions})


@pytest.mark.parametrize("captions", [None, "", " ", [], ["", " \n"]])
@pytest.mark.parametrize("choose", ["first", "random"])
def test_a_sample_whose_captions_are_empty_is_refused_unless_it_may_lack_one(choose: Any, captions: Any) -> None:
    with pytest.raises(MissingValueError, match=r"'captions' in \.json holds no text"):
        value(Text(path="captions", choose=choose), {"captions": captions})
    assert value(Text(path="captions", choose=choose, required=False), {"captions": captions}) is None


def test_a_missing_path_is_damage_unless_the_sample_may_lack_it() -> None:
    with pytest.raises(CorruptionError, match="has no 'captions'"):
        value(RANDOM, {"caption": "a"})
    assert value(Text(path="captions", required=False), {"caption": "a"}) is None


@pytest.mark.parametrize("data", [b'{"captions": "caf\xe9"}', b'{"captions": "\\ud800"}', b'{"captions": ["\\udfff"]}'])
def test_captions_that_are_not_unicode_text_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        RANDOM.decode(input_of({"json": data}))


def test_a_caption_of_more_than_a_mebibyte_is_refused() -> None:
    assert value(RANDOM, {"captions": ["x" * TEXT_BYTES]}) == "x" * TEXT_BYTES
    with pytest.raises(UnsupportedError, match=r"larger than 1\.0 MiB"):
        value(RANDOM, {"captions": ["x" * (TEXT_BYTES + 1)]})


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(anything | st.lists(st.text(max_size=4), max_size=5))
def test_the_first_text_is_the_one_that_the_index_holds(captions: Any) -> None:
    try:
        indexed = text_of({"captions": captions}, "captions")
    except UnsupportedError:
        with pytest.raises(CorruptionError, match="is not a text"):
            value(Text(path="captions", required=False), {"captions": captions})
        return
    assert value(Text(path="captions", required=False), {"captions": captions}) == indexed
    assert (value(Text(path="captions", choose="random", required=False), {"captions": captions}) is None) == (
        indexed is None
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"path": "a", "choose": "last"}, "choose cannot be 'last'"),
        ({"choose": "random"}, "needs a path"),
        ({"file": "txt", "choose": "random"}, "needs a path"),
        ({"path": "a", "weights": "b"}, "weights need choose='random'"),
        ({"path": "a."}, "not a path"),
        ({"path": "a", "choose": "random", "weights": "[x"}, "not a path"),
        ({"path": 3}, "path"),
        ({"path": "a", "file": "a/b"}, "file cannot be"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Text(**options)


# --- with a loader


def captions(number: int) -> list[str]:
    return [f"{number} {word}" for word in ("short", "long", "funny", "exact")]


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Twelve sounds with four captions each."""
    folder = tmp_path_factory.mktemp("captioned")
    (folder / "in").mkdir()
    for number in range(12):
        write_wav(folder / "in" / f"{number:02}.wav", seconds=0.02)
        (folder / "in" / f"{number:02}.json").write_text(json.dumps({"captions": captions(number)}))
    with pack(folder / "in", folder / "ds", workers=1, text_field="captions") as dataset:
        yield dataset


@pytest.fixture
def make(captioned: Dataset) -> Iterator[Callable[..., Loader]]:
    loaders = []

    def loader(batch_size: int, **options: Any) -> Loader:
        fields = {"caption": RANDOM, "first": Text()}
        loaders.append(Loader(captioned, batch_size, fields=fields, num_threads=2, sidecar=None, **options))
        return loaders[-1]

    yield loader
    for one in loaders:
        one.close()


def by_key(batches: list[dict[str, Any]]) -> dict[str, str]:
    return {key: text for batch in batches for key, text in zip(batch["key"], batch["caption"], strict=True)}


def test_each_epoch_draws_other_captions_that_no_rank_or_resume_changes(make: Callable[..., Loader]) -> None:
    whole = take(make(4, seed=3), 12)  # four epochs of three batches
    epochs = [by_key(whole[begin : begin + 3]) for begin in range(0, 12, 3)]
    for epoch in epochs:
        assert len(epoch) == 12
        assert all(text in captions(int(key)) for key, text in epoch.items())
    assert all(epochs[0] != epoch for epoch in epochs[1:])
    assert len({text for epoch in epochs for text in epoch.values()}) > 24
    assert all(text == captions(int(key))[0] for b in whole for key, text in zip(b["key"], b["first"], strict=True))
    loader = make(4, seed=3)
    take(loader, 4)
    state = json.loads(json.dumps(loader.state_dict()))
    ranks = [make(2, seed=3, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for batch, *parts in zip(whole[4:], *(take(rank, 8) for rank in ranks), strict=True):
        assert [text for part in parts for text in part["caption"]] == batch["caption"]
    assert by_key(take(make(4, seed=4), 3)) != epochs[0]


def test_captions_of_files_that_were_indexed_in_place(tmp_path: Path) -> None:
    import io
    import tarfile

    from headrace.dataio import index

    sound = write_wav(tmp_path / "a.wav", seconds=0.02).read_bytes()
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for number in range(4):
            document = {"captions": captions(number) if number != 2 else None}
            for ext, data in (("json", json.dumps(document).encode()), ("wav", sound)):
                info = tarfile.TarInfo(f"{number}.{ext}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    with index(tmp_path / "0.tar", tmp_path / "ds", text_field="captions") as dataset:
        fields = {"first": Text(), "any": Text(path="captions", choose="random")}
        with Loader(dataset, 3, fields=fields, shuffle=False, sidecar=None) as loader:
            batch = next(iter(loader))
        assert batch["key"] == ["0", "1", "3"]  # Text() leaves out a sample without a text
        assert batch["first"] == [captions(number)[0] for number in (0, 1, 3)]
        assert all(text in captions(number) for text, number in zip(batch["any"], (0, 1, 3), strict=True))
