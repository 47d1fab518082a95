"""How a changed block is stored: every change decodes to the new bytes, and damaged or hostile bytes are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.publishing.difference import SPARSE, WHOLE, XOR, decode, encode
from headrace.dataio.core.errors import CorruptionError


@given(
    seed=st.integers(0, 1000),
    item=st.sampled_from([1, 2, 4, 8, 16]),
    elements=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.0005, 0.02, 0.2, 0.5, 1.0]),
    bits=st.sampled_from([1, 3, 8]),
)
def test_a_block_decodes_to_the_new_bytes(seed: int, item: int, elements: int, share: float, bits: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * item, np.uint8)
    new = old.copy()
    changed = rng.random(elements) < share
    new.reshape(elements, item)[changed, 0] ^= rng.integers(1, 1 << bits, changed.sum(), np.uint8)
    how, stored = encode(new, old, item)
    block = old.copy()
    decode(memoryview(bytearray(stored)), how, len(new), item).apply(block, item)
    assert np.array_equal(block, new)
    assert len(stored) <= len(new) + 64


@pytest.mark.parametrize(("share", "how"), [(0.02, SPARSE), (0.6, XOR), (1.0, WHOLE)])
def test_the_smallest_form_is_chosen(share: float, how: int) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, 1 << 19, np.uint16)
    new = np.where(
        rng.random(len(old)) < share, old ^ 1 if share < 1 else rng.integers(0, 1 << 16, len(old), np.uint16), old
    )
    chosen, stored = encode(new.view(np.uint8), old.view(np.uint8), 2)
    assert chosen == how
    if how == SPARSE:
        assert len(stored) < 0.02 * new.nbytes


def sparse(count: int, width: int, planes: bytes) -> memoryview:
    return memoryview(struct.pack("<IB", count, width) + zstandard.compress(planes))


@pytest.mark.parametrize(
    ("how", "stored"),
    [
        (WHOLE, memoryview(b"short")),
        (XOR, memoryview(zstandard.compress(bytes(5)))),
        (XOR, memoryview(b"no frame at all")),
        (SPARSE, memoryview(b"")),
        (SPARSE, sparse(1 << 30, 1, b"")),
        (SPARSE, sparse(1, 3, bytes(5))),
        (SPARSE, sparse(1, 1, bytes([200, 1, 0]))),  # position 200 of 50 elements
        (SPARSE, sparse(2, 1, bytes([1, 0, 1, 1, 0, 0]))),  # one position twice
        (SPARSE, sparse(2, 1, bytes(2))),
        (7, memoryview(bytes(100))),
    ],
)
def test_damaged_blocks_are_refused(how: int, stored: memoryview) -> None:
    with pytest.raises(CorruptionError):
        decode(stored, how, 100, 2)
