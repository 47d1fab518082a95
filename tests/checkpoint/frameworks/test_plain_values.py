"""Small objects as plain values, there and back; no framework is needed."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint.frameworks.plain import packed, unpacked
from headrace.checkpoint.state import tree
from headrace.dataio.core.errors import CorruptionError, UsageError


def there_and_back(value: Any) -> Any:
    """As a step keeps it."""
    return unpacked(tree.decode(tree.encode({"value": packed(value)})))["value"]


def test_generators_states_come_back_with_their_types() -> None:
    given: dict[str | int, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), 7: None}
    given["torch"] = torch.get_rng_state()
    found = there_and_back(given)
    assert found["python"] == given["python"]
    assert found["numpy"][0] == given["numpy"][0]
    assert found["numpy"][1].dtype == np.uint32
    assert (found["numpy"][1] == given["numpy"][1]).all()
    assert torch.equal(found["torch"], given["torch"])
    np.random.set_state(found["numpy"])
    random.setstate(found["python"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_of_all_types_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = torch.ones(shape).to(dtype)
    found = there_and_back([given.t() if given.dim() == 2 else given])[0]
    assert found.dtype == dtype
    assert found.shape == (given.t().shape if given.dim() == 2 else given.shape)
    assert torch.equal(found.to(torch.complex64), torch.ones(found.shape, dtype=torch.complex64))


def test_streams_and_numbers_of_numpy_come_back() -> None:
    found = there_and_back((io.BytesIO(b"scales"), np.float64(2.5), [np.int64(3)]))
    assert found[0].getvalue() == b"scales"
    assert type(found[1]) is np.float64
    assert found[1:] == (2.5, [3])


def test_what_cannot_be_kept_or_made_is_said() -> None:
    with pytest.raises(UsageError, match="array of Python objects"):
        packed(np.array([object()]))
    with pytest.raises(UsageError, match="the key"):
        packed({"headrace:plain": 1})
    with pytest.raises(CorruptionError, match="cannot be decoded"):
        unpacked({"headrace:plain": "tensor", "dtype": "float32", "shape": (2,), "bytes": b"123"})
    with pytest.raises(UsageError, match="cannot be saved"):
        tree.encode(packed({"x": object()}))
