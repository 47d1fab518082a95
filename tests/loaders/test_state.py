"""Loader states: small, exact, and refused with the field's name when they do not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dataio.core.errors import MismatchError, UsageError
from loaders import Clip, Order
from loaders.order.buckets import Bucketed
from loaders.order.mixture import Mixed
from loaders.order.schedule import Plain, Population
from loaders.state import MAX_COUNT, Fingerprint, Identity, Position, dump, load

DIGEST = "0123456789abcdef" * 4
ORDER = Order.of(10**9, 4096, sample_bytes=300_000, seed=123456)
CLIP = Clip(128, fps=29.97, per_video=16)
HERE = Fingerprint(Identity(41, DIGEST), 123456, Plain(ORDER, drop_last=False).described(), CLIP)
MIXED = Mixed.of({name: Population(10**6, 3e5) for name in ("speech", "music", "video")}, 4096, weights=None)
MIXTURE = Fingerprint(
    {name: Identity(41, DIGEST, 10**6) for name in MIXED.names}, 123456, MIXED.described(2, 100), CLIP
)


def length(fingerprint: Fingerprint) -> int:
    """Bytes of JSON in its default encoding, far into a long run that goes by a list of bad samples."""
    return len(json.dumps(dump(fingerprint, Position(12_345, 243_000, (), (1234, "0123abcd")))))


def loaded(state: Any, here: Fingerprint = HERE) -> Position:
    return load(lambda epoch, batch: here, state)


@pytest.mark.parametrize(
    "clip", [CLIP, Clip(128, fps=30_000 / 1001, per_video=16), Clip(128, 30, start="every", jitter=12), Clip()]
)
def test_a_state_takes_less_than_200_bytes_of_json(clip: Clip) -> None:
    assert length(replace(HERE, clip=clip)) < 200


@pytest.mark.parametrize("seed", [123456, (1 << 63) - 1])
def test_buckets_take_at_most_40_bytes_more(seed: int) -> None:
    buckets = Bucketed.of([64, 32], [Population(10**6, 3e5)] * 2, [1, 2], seed=seed)
    clip = Clip(128, fps=30_000 / 1001, start="center", per_video=16, jitter=12)
    assert length(replace(HERE, seed=seed, order=buckets.described(), clip=clip)) < 240


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
    position = Position(epoch, batch, tuple(quarantine), listed)
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
        ({"speech": SAME, "music": Identity(40, DIGEST), "video": SAME}, "sources.music.version"),
        ({"speech": Identity(41, "e" * 64), "music": SAME, "video": SAME}, "sources.speech.digest"),
        ({"speech": SAME, "music": SAME}, "sources was"),
    ],
)
def test_a_changed_source_is_named(sources: dict[str, Identity], named: str) -> None:
    with pytest.raises(MismatchError, match=named):
        loaded(dump(replace(MIXTURE, sources=sources), Position(0, 0)), MIXTURE)


def test_a_state_of_another_kind_of_loader_is_refused_by_field() -> None:
    with pytest.raises(MismatchError, match="version was None"):
        loaded(dump(MIXTURE, Position(0, 0)))
    with pytest.raises(MismatchError, match="sources was None"):
        loaded(dump(HERE, Position(0, 0)), MIXTURE)
    more = dump(HERE, Position(0, 0)) | {"weights": "abc"}
    with pytest.raises(MismatchError, match="weights was 'abc' when its state was saved, and is None now"):
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
