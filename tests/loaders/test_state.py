"""Loader states: small, exact, and refused with the field's name when they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.core.errors import MismatchError, UsageError
from loaders import Clip, Order
from loaders.state import Fingerprint, Position, dump, load

ORDER = Order.of(10**9, 4096, sample_bytes=300_000, seed=123456)
HERE = Fingerprint.of(41, "0123456789abcdef" * 4, ORDER, Clip(128, fps=29.97, per_video=16), drop_last=False)


def test_a_state_takes_less_than_200_bytes_of_json() -> None:
    assert len(json.dumps(dump(HERE, Position(12_345, 243_000)))) < 200


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.lists(st.integers(0, 2**40), max_size=5))
def test_a_state_survives_json(epoch: int, batch: int, quarantine: list[int]) -> None:
    position = Position(epoch, batch, tuple(quarantine))
    assert load(HERE, json.loads(json.dumps(dump(HERE, position)))) == position
    assert load(HERE, dump(HERE, position)) == position


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("version", 40),
        ("digest", "ffff"),
        ("seed", 7),
        ("global_batch", 8),
        ("clip", (16, 1, None, "random", 1)),
        ("order", ()),
        ("drop_last", True),
    ],
)
def test_each_difference_is_named_with_both_values(field: str, other: Any) -> None:
    saved = dump(replace(HERE, **{field: other}), Position(0, 0))
    with pytest.raises(MismatchError) as caught:
        load(HERE, saved)
    for part in (field, _plain(other), _plain(getattr(HERE, field))):
        assert str(part) in caught.value.message


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("broken", [{}, [], {"epoch": 1}, "state"])
def test_what_is_no_state_is_refused(broken: Any) -> None:
    with pytest.raises(UsageError, match="not the state"):
        load(HERE, broken)


@pytest.mark.parametrize("change", [{"epoch": -1}, {"batch": "7"}, {"quarantine": [None]}])
def test_impossible_positions_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="impossible"):
        load(HERE, dump(HERE, Position(0, 0)) | change)
