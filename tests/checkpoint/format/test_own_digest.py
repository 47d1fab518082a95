"""The digest inside manifests and groups: every flipped bit is found or changes nothing; older objects are read twice."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.format import own_digest
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store

KEY, MOST = "runs/r/object", 1 << 20


def answers(*objects: bytes) -> Any:
    """A store that answers every `get` with the next of these objects."""
    store = mock.create_autospec(Store, instance=True)
    store.get.side_effect = objects
    return store


def flipped(data: bytes, bit: int = 40) -> bytes:
    wrong = bytearray(data)
    wrong[bit // 8] ^= 1 << bit % 8
    return bytes(wrong)


PLAIN = msgspec.msgpack.encode({"version": 1, "run": "exp"})
WITH = own_digest.append(PLAIN)


@given(st.integers(1, 40))
def test_the_digest_is_the_last_entry_of_a_map_that_any_reader_can_decode(entries: int) -> None:
    plain = {f"field{i}": i for i in range(entries)}
    data = own_digest.append(msgspec.msgpack.encode(plain))
    own_digest.check(data, KEY)
    found = msgspec.msgpack.decode(data)
    assert list(found)[-1] == "digest"
    assert {name: value for name, value in found.items() if name != "digest"} == plain


def test_something_other_than_a_map_gets_no_digest() -> None:
    with pytest.raises(ValueError, match="not a MessagePack map"):
        own_digest.append(msgspec.msgpack.encode([1]))


def test_every_flipped_bit_is_found_or_changes_nothing() -> None:
    class Document(msgspec.Struct):
        version: int
        run: str

    missed = 0
    for bit in range(8 * len(WITH)):
        data = flipped(WITH, bit)
        try:
            own_digest.check(data, KEY)
            found = msgspec.msgpack.decode(data, type=Document)
        except (CorruptionError, msgspec.MsgspecError, UnicodeDecodeError):
            continue
        missed += 1
        assert found == Document(1, "exp")
    assert missed <= 8 * 9  # only bits of the name "digest" and of its length


def test_a_damaged_object_is_fetched_again() -> None:
    store = answers(flipped(WITH), flipped(WITH, 50), WITH)
    assert own_digest.fetch(store, KEY, max_bytes=MOST) == WITH
    assert store.invalidate.mock_calls == [mock.call(KEY)] * 2


def test_an_object_that_is_damaged_three_times_is_an_error() -> None:
    with pytest.raises(CorruptionError, match="own digest does not match its bytes"):
        own_digest.fetch(answers(*[flipped(WITH)] * 3), KEY, max_bytes=MOST)


def test_an_object_of_an_older_version_is_read_until_two_copies_are_equal() -> None:
    assert own_digest.fetch(answers(PLAIN, PLAIN), KEY, max_bytes=MOST) == PLAIN
    wrong = flipped(PLAIN)
    assert own_digest.fetch(answers(wrong, PLAIN, PLAIN), KEY, max_bytes=MOST) == PLAIN
    with pytest.raises(CorruptionError, match="differs each time it is read"):
        own_digest.fetch(answers(PLAIN, wrong, PLAIN), KEY, max_bytes=MOST)


def test_a_flip_in_the_name_of_the_digest_does_not_pass_for_an_older_version() -> None:
    wrong = flipped(WITH, 8 * (len(WITH) - 40))
    assert not own_digest.has_digest(wrong)
    assert own_digest.fetch(answers(wrong, WITH), KEY, max_bytes=MOST) == WITH
