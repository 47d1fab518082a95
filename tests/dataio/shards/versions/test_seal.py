"""Documents that carry their own digest."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.json import seal, unseal

DOCUMENT = json.dumps({"name": "clips ü", "samples": 3}, indent=1).encode() + b"\n"
SEALED = seal(DOCUMENT)


def test_a_sealed_document_is_json_that_holds_its_digest_last() -> None:
    assert list(json.loads(SEALED)) == ["name", "samples", "digest"]
    assert unseal(SEALED, "it") == DOCUMENT


@given(st.integers(0, len(SEALED) * 8 - 1))
def test_every_flipped_bit_is_found(bit: int) -> None:
    data = bytearray(SEALED)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError, match="it "):
        unseal(bytes(data), "it")


@given(st.integers(0, len(SEALED) - 1))
def test_every_truncation_is_found(length: int) -> None:
    with pytest.raises(CorruptionError, match="does not end in its digest"):
        unseal(SEALED[:length], "it")


def test_only_an_indented_object_can_be_sealed() -> None:
    with pytest.raises(ValueError):
        seal(b"{}")
