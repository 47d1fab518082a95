"""Loader states: small, exact, and refused with the field's name when they do not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core.errors import MismatchError, UsageError
from headrace.loaders import Clip, Order
from headrace.loaders.audio.spec import Window
from headrace.loaders.sampling.buckets import Bucketed
from headrace.loaders.sampling.mixed_buckets import MixedBuckets
from headrace.loaders.sampling.mixture import Mixed
from headrace.loaders.sampling.schedule import Evaluation, Plain, Population
from headrace.loaders.sampling.state import MAX_COUNT, Fingerprint, Identity, Position, dump, load

DIGEST = "0123456789abcdef" * 4
ORDER = Order.of(10**9, 4096, sample_bytes=300_000, seed=123456)
CLIP = Clip(128, fps=29.97, per_video=16)
HERE = Fingerprint(Identity(41, DIGEST), 123456, order=Plain(ORDER, drop_last=False).described(), clip=CLIP)
MIXED = Mixed.of({name: Population(10**6, 3e5) for name in ("speech", "music", "video")}, 4096, weights=None)
MIXTURE = Fingerprint(
    {name: Identity(41, DIGEST, 10**6) for name in MIXED.names}, 123456, order=MIXED.described(2, 100), clip=CLIP
)


def length(fingerprint: Fingerprint) -> int:
    """Bytes of JSON in its default encoding, far into a long run that goes by a list of bad samples."""
    return len(json.dumps(dump(fingerprint, Position(12_345, 243_000, quarantine=(), listed=(1234, "0123abcd")))))


def loaded(state: Any, here: Fingerprint = HERE) -> Position:
    return load(lambda epoch, batch: here, state)


@pytest.mark.parametrize(
    "clip", [CLIP, Clip(128, fps=30_000 / 1001, per_video=16), Clip(128, 30, start="every", jitter=12), Clip()]
)
def test_a_state_takes_less_than_200_bytes_of_json(clip: Clip) -> None:
    assert length(replace(HERE, clip=clip)) < 200


SIZES = Population(10**8, 1.0)
BUCKETED = Bucketed.of([64, 32], [SIZES] * 2, [1, 2])
EVERY = {
    "plain": Plain(Order.of(1 << 40, 9_999_999, clips=1000)).described(),
    "buckets": BUCKETED.described(),
    "buckets and the tail": Bucketed.of([64, 32], [SIZES] * 2, [1, 2], drop_last=False).described(),
    "evaluation": Evaluation.of([SIZES], [9_999_999]).described(),
    "evaluation in buckets": Evaluation.of([SIZES] * 2, [64, 32], buckets=[0, 1], numbers=[1, 2]).described(),
    "mixture": Mixed.of({"a": SIZES, "b": SIZES}, 9_999_999).described(MAX_COUNT, 9),
    "mixture in buckets": MixedBuckets.of({"a": [SIZES] * 2, "b": [SIZES] * 2}, [64, 32], [1, 2]).described(7, 9),
}
WHATS: list[Any] = [
    Clip(1 << 16, fps=30_000 / 1001, start="center", per_video=10**9, jitter=10**9),
    Clip(),
    Window(86_399.123456789, "center", 10**9, 86_399.123456789),
    [1 << 40, 65_536, "split", True, 384_000],  # a packing
    "files",
]
LARGEST = Position(MAX_COUNT, MAX_COUNT, quarantine=(), listed=(999_999_999, "0123abcd"))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("what", WHATS, ids=str)
@pytest.mark.parametrize("seed", [0, 1 << 34, (1 << 64) - 1, -(1 << 63)])
def test_no_state_takes_200_bytes_whatever_the_numbers(kind: str, what: Any, seed: int) -> None:
    sources: Any = {} if kind.startswith("mixture") else Identity(9_999_999, DIGEST)
    here = Fingerprint(sources, seed, order=EVERY[kind], clip=what)
    for position in (LARGEST, Position(0, 0), Position(12_345, 243_000, quarantine=(), listed=(1234, "0123abcd"))):
        state = json.loads(json.dumps(dump(here, position)))
        assert len(json.dumps(state)) < 200
        assert loaded(state, here) == position
        assert list(state) == list(dump(here, Position(0, 0)))
        for other in (
            replace(here, clip=Clip(77)),
            replace(here, order={**here.order, "order": [1]}),
            replace(here, order={**here.order, "buckets" if "buckets" in here.order else "global_batch": 7}),
        ):
            with pytest.raises(MismatchError):
                loaded(state, other)


def test_a_state_with_separate_bucket_fields_still_loads() -> None:
    here = replace(HERE, order=BUCKETED.described())
    state = dump(here, Position(3, 7))
    name, *order = state.pop("order")
    assert loaded(state | {"buckets": name, "order": order}, here) == Position(3, 7)
    with pytest.raises(MismatchError, match="buckets was 'other'"):
        loaded(state | {"buckets": "other", "order": order}, here)


def test_what_a_digest_stands_for_is_compared_by_name() -> None:
    clip = Clip(1 << 16, fps=30_000 / 1001, start="center", per_video=10**9, jitter=10**9)
    here = replace(HERE, seed=1 << 62, order=BUCKETED.described(), clip=clip)
    others = Bucketed.of([64, 32], [SIZES] * 2, [1, 3]).described()
    named = {"clip": replace(here, clip=Clip(3)), "buckets": replace(here, order=others)}
    for field, other in named.items():
        with pytest.raises(MismatchError, match=f"the loader's {field} was"):
            loaded(dump(here, LARGEST), other)


def test_a_source_of_a_mixture_takes_45_bytes_more() -> None:
    alone = length(replace(MIXTURE, sources={}))
    assert alone < 200
    assert length(MIXTURE) < alone + 3 * 45


pairs = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, MAX_COUNT)), max_size=5)


lists = st.none() | st.tuples(st.integers(0, 100_000), st.sampled_from(["", "0123abcd"]))


@given(st.integers(0, MAX_COUNT), st.integers(0, MAX_COUNT), pairs, lists)
def test_a_state_survives_json(
    epoch: int, batch: int, quarantine: list[tuple[int, int]], listed: tuple[int, str] | None
) -> None:
    position = Position(epoch, batch, quarantine=tuple(quarantine), listed=listed)
    assert loaded(json.loads(json.dumps(dump(MIXTURE, position))), MIXTURE) == position
    assert loaded(dump(MIXTURE, position), MIXTURE) == position
    alone = replace(position, quarantine=tuple((0, number) for _, number in quarantine))
    assert loaded(json.loads(json.dumps(dump(HERE, alone)))) == alone


def test_a_state_has_the_same_keys_wherever_it_is() -> None:
    assert list(dump(HERE, Position(0, 0))) == list(dump(HERE, Position(3, 7, ((0, 5),))))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("version", replace(HERE, sources=Identity(40, DIGEST))),
        ("digest", replace(HERE, sources=Identity(41, "f" * 64))),
        ("seed", replace(HERE, seed=7)),
        ("global_batch", replace(HERE, order={**HERE.order, "global_batch": 8})),
        ("order", replace(HERE, order={**HERE.order, "order": []})),
        ("drop_last", replace(HERE, order=Plain(ORDER, drop_last=True).described())),
        ("clip", replace(HERE, clip=Clip(64))),
    ],
)
def test_each_difference_is_named_with_both_values(field: str, other: Fingerprint) -> None:
    with pytest.raises(MismatchError) as caught:
        loaded(dump(other, Position(0, 0)))
    named = "order" if field == "drop_last" else field
    for value in (field, other.values()[named], HERE.values()[named]):
        assert str(value) in caught.value.message
    assert "force=True" in caught.value.hint


SAME = Identity(41, DIGEST)


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        ({"speech": SAME, "music": Identity(40, DIGEST), "video": SAME}, "the version of the mixture's 'music' was 40"),
        ({"speech": Identity(41, "e" * 64), "music": SAME, "video": SAME}, "the digest of the mixture's 'speech' was"),
        ({"speech": SAME, "music": SAME}, "sources was"),
    ],
)
def test_a_changed_source_is_named(sources: dict[str, Identity], named: str) -> None:
    with pytest.raises(MismatchError, match=named):
        loaded(dump(replace(MIXTURE, sources=sources), Position(0, 0)), MIXTURE)


def test_another_version_is_the_datasets_and_the_hint_says_how_to_pin_it() -> None:
    state = dump(replace(HERE, sources=Identity(40, DIGEST)), Position(0, 0))
    with pytest.raises(MismatchError, match=r"the dataset's version was 40 when .* saved, and is 41 now") as caught:
        loaded(state)
    assert caught.value.hint.startswith("give the loader version=40; ")
    older = {**MIXTURE.sources, "music": Identity(40, DIGEST)}  # type: ignore[dict-item]
    with pytest.raises(MismatchError) as caught:
        loaded(dump(replace(MIXTURE, sources=older), Position(0, 0)), MIXTURE)
    assert caught.value.hint.startswith("open this source with Dataset(url, version=40); ")


def test_a_state_of_another_kind_of_loader_is_refused_by_field() -> None:
    with pytest.raises(MismatchError, match="version was None"):
        loaded(dump(MIXTURE, Position(0, 0)))
    with pytest.raises(MismatchError, match="sources was None"):
        loaded(dump(HERE, Position(0, 0)), MIXTURE)
    more = dump(HERE, Position(0, 0)) | {"weights": "abc"}
    with pytest.raises(MismatchError, match="weights was 'abc' when the loader's state was saved, and is None now"):
        loaded(more)


@pytest.mark.parametrize("broken", [{}, [], {"epoch": 1}, "state", {"seed": 1, "epoch": 1, "batch": 1}])
def test_what_is_no_state_is_refused(broken: Any) -> None:
    with pytest.raises(UsageError, match="not the state"):
        loaded(broken)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"batch": "7"},
        {"quarantine": [None]},
        {"quarantine": [[1, 2, 3]]},
        {"quarantine": ["x:1"]},
        {"quarantine": [3, "1:ab"]},
        {"quarantine": 7.5},
        {"batch": MAX_COUNT + 1},
    ],
)
def test_impossible_positions_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="impossible"):
        loaded(dump(HERE, Position(0, 0)) | change)
