"""`read`: looking into a step without its state."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.restoring.saved_step import LazyTensor, SavedStep
from headrace.checkpoint.state import tree
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    where = tmp_path_factory.mktemp("repo")
    state = {
        "model": torch.nn.Linear(4, 3),
        "big": torch.arange(6 * MIB, dtype=torch.float32).view(6, -1),
        "cube": torch.arange(5 * 4 * 3).view(5, 4, 3).bfloat16(),
        "n": {"lr": 0.1, "none": None, "list": [1, "a"], "empty": {}},
    }
    with Checkpointer(str(where), run="exp", sidecar=None) as checkpointer:
        checkpointer.save(7, state).result(60)
    return where, state


def opened(saved: tuple[Path, dict[str, Any]]) -> SavedStep:
    return read(Path(saved[0]), run="exp")


def test_entries_are_a_mapping_of_paths(saved: tuple[Path, dict[str, Any]]) -> None:
    with opened(saved) as step:
        assert step.step == 7
        assert list(step) == [
            "model/weight", "model/bias", "big", "cube", "n/lr", "n/none", "n/list/0", "n/list/1", "n/empty",
        ]  # fmt: skip
        assert (step["n/lr"], step["n/none"], step["n/empty"]) == (0.1, None, {})
        assert "model/bias" in step
        assert repr(step["model/weight"]) == "LazyTensor((3, 4), torch.float32)"
        assert torch.equal(step["model/weight"].read(), saved[1]["model"].weight)
        with pytest.raises(NotFoundError, match="has no entry 'x'"):
            step["x"]
        with pytest.raises(NotFoundError, match="no step 8"):
            read(str(saved[0]), run="exp", step=8)


def leases() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-lease")}


def test_a_tensor_keeps_its_step_open_and_the_last_one_closes_it(saved: tuple[Path, dict[str, Any]]) -> None:
    before = leases()
    tensor = read(str(saved[0]), run="exp")["model/weight"]
    gc.collect()
    assert len(leases() - before) == 1
    assert torch.equal(tensor[0], saved[1]["model"].weight[0])
    del tensor
    gc.collect()
    wait_for(lambda: not leases() - before)


def test_what_was_closed_is_not_read(saved: tuple[Path, dict[str, Any]]) -> None:
    before = leases()
    with read(str(saved[0]), run="exp") as step:
        tensor = step["model/weight"]
    assert not leases() - before
    with pytest.raises(UsageError, match="was closed"):
        tensor.read()


def test_a_step_that_cannot_be_opened_leaves_no_lease(
    saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = leases()
    monkeypatch.setattr(tree, "decode", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read(str(saved[0]), run="exp")
    assert not leases() - before


def test_only_the_chunks_of_a_slice_are_read(saved: tuple[Path, dict[str, Any]]) -> None:
    read_bytes: list[int] = []

    class Counting(Wrapped):
        def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
            read_bytes.append(sum(len(view) for _, view in ranges))
            self.inner.get_ranges_into(key, ranges)

    with open_store(saved[0]) as store, read(Counting(store), run="exp") as step:
        assert read_bytes == []
        assert torch.equal(step["big"][4, 100:200], saved[1]["big"][4, 100:200])
        assert sum(read_bytes) <= 4 * MIB  # one chunk of six


INDEX = st.integers(-3, 2) | st.slices(4).filter(lambda s: (s.step or 1) > 0)


@settings(max_examples=40, deadline=None)
@given(index=st.lists(INDEX, max_size=3).map(tuple) | INDEX | st.just(Ellipsis) | st.booleans())
def test_a_slice_is_what_torch_would_give(saved: tuple[Path, dict[str, Any]], index: Any) -> None:
    with opened(saved) as step:
        lazy = step["cube"]
        assert isinstance(lazy, LazyTensor)
        assert torch.equal(lazy[index], saved[1]["cube"][index])


def test_bad_slices_are_refused(saved: tuple[Path, dict[str, Any]]) -> None:
    with opened(saved) as step:
        with pytest.raises(IndexError):
            step["cube"][5]
        with pytest.raises(UsageError, match="negative step"):
            step["cube"][::-1]
