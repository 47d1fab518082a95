"""`Checkpointer` as a trainer uses it: real torch state, real stores, mistakes and failures."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headrace import checkpoint
from headrace.checkpoint import RNG, Checkpointer, Keep, SaveResult
from headrace.checkpoint.format.chunking import ITEM_BYTES
from headrace.checkpoint.repository import writers
from headrace.checkpoint.state.tensors import as_bits, empty
from headrace.dataio.core.errors import (
    AmbiguousWriteError,
    CapacityError,
    ConflictError,
    CorruptionError,
    DeadlineError,
    HeadraceError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.checkpoint_states import Wrapped, flip


def open_at(where: Path | Store, run: str = "exp", **options: Any) -> Checkpointer:
    return Checkpointer(where, run=run, sidecar=None, **options)


class Trainer:
    """A small model with everything that has a state."""

    def __init__(self, seed: int = 0, width: int = 16) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "sched": self.scheduler, "rng": RNG()}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(4, 8) * random.random() + float(np.random.rand())
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def test_the_public_list_is_short_and_whole() -> None:
    assert checkpoint.__all__ == [
        "RNG",
        "Checkpointer",
        "Handle",
        "Keep",
        "SaveResult",
        "Subscriber",
        "copy",
        "diff",
        "export",
        "import_checkpoint",
        "read",
        "read_artifact",
    ]
    assert all(getattr(checkpoint, name) is not None for name in checkpoint.__all__)
    assert dir(checkpoint) == sorted(checkpoint.__all__)
    with pytest.raises(AttributeError):
        _ = checkpoint.nothing


def test_training_goes_on_bit_for_bit_after_a_restore(store_url: str) -> None:
    first = Trainer()
    with Checkpointer(store_url, run="exp", sidecar=None) as checkpointer:
        assert checkpointer.restore(first.state()) is None
        assert checkpointer.steps() == []
        first.train(3)
        handle = checkpointer.save(3, first.state())
        handle.staged(60)
        result = handle.result(60)
        expected = first.train(4)
        assert checkpointer.steps() == [3]
    assert isinstance(result, SaveResult)
    assert (result.step, result.timeline, result.committed_by) == (3, 1, "process")
    assert result.bytes_written == result.bytes_state > 0
    assert result.stall == handle.stall > 0
    second = Trainer(seed=99)
    with Checkpointer(store_url, run="exp", sidecar=None) as checkpointer:
        assert checkpointer.restore(second.state()) == 3
        assert second.train(4) == expected
        assert checkpointer.save(7, second.state()).result(60).timeline == 2
        assert checkpointer.steps() == [3, 7]


def test_the_state_may_change_as_soon_as_save_has_returned(tmp_path: Path) -> None:
    held = threading.Event()

    class Held(Wrapped):
        def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
            assert held.wait(60)
            return self.inner.put_multipart(key, parts)

    state: dict[str, Any] = {"w": torch.arange(300_000.0), "t": torch.arange(6.0).reshape(2, 3).t(), "n": [1]}
    with open_store(tmp_path) as store, open_at(Held(store)) as checkpointer:
        handle = checkpointer.save(1, state)
        state["w"].zero_()
        state["t"].zero_()
        state["n"].append(2)
        held.set()
        handle.result(60)
        assert checkpointer.restore(state) == 1
    assert torch.equal(state["w"], torch.arange(300_000.0))
    assert torch.equal(state["t"], torch.arange(6.0).reshape(2, 3).t())
    assert state["n"] == [1]


def zoo() -> dict[str, torch.Tensor]:
    """Every element type as random bits, in awkward shapes."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, size in ITEM_BYTES.items():
        bits = torch.randint(0, 2 if name == "bool" else 256, (24 * size,), dtype=torch.uint8, generator=generator)
        made[name] = bits.view(getattr(torch, name)).view(4, 6)
        made[f"{name} strided"] = made[name].t()
        made[f"{name} every other"] = made[name][:, ::2]
        made[f"{name} scalar"] = made[name][0, 0]
        made[f"{name} empty"] = made[name][:0]
    made["conjugate"] = torch.randn(5, dtype=torch.complex64).conj()
    made["negative"] = torch.randn(5, dtype=torch.complex64).conj().imag
    made["expanded"] = torch.randn(3, 1).expand(3, 4)
    made["nan"] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    made["large strided"] = torch.randn(700, 600).t()
    return made


def bits_of(tensor: torch.Tensor) -> bytes:
    plain = as_bits(tensor.resolve_conj().resolve_neg()).contiguous()
    return bytes(plain.flatten().view(torch.uint8).numpy()) if plain.numel() else b""


def test_every_element_type_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = zoo()
    fresh = {name: empty(t.dtype, tuple(t.shape)) for name, t in saved.items()}
    fresh["large strided"] = torch.empty(600, 700).t().t()
    fresh["float32 strided"] = torch.empty(4, 6).t()
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"zoo": saved}).result(60)
        assert checkpointer.restore({"zoo": fresh}) == 1
    for name, tensor in saved.items():
        assert bits_of(fresh[name]) == bits_of(tensor), name


@pytest.mark.parametrize("made", [lambda t: t.conj(), lambda t: t.t().conj(), lambda t: t.conj().imag])
def test_views_that_conjugate_or_negate_are_restored(made: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    saved = made(torch.randn(4, 4, dtype=torch.complex64)).clone()
    given = made(torch.zeros(4, 4, dtype=torch.complex64))
    assert given.is_conj() or given.is_neg()
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"t": saved}).result(60)
        checkpointer.restore({"t": given})
    assert bits_of(given) == bits_of(saved)


def test_a_tensor_whose_memory_was_freed_is_neither_saved_nor_restored(tmp_path: Path) -> None:
    freed, whole = torch.ones(5), torch.ones(5)
    freed.untyped_storage().resize_(0)
    with open_at(tmp_path) as checkpointer:
        with pytest.raises(UnsupportedError, match=r"^layer/w: the memory of the tensor was freed"):
            checkpointer.save(1, {"layer": {"w": freed}})
        checkpointer.save(1, {"layer": {"w": whole}, "n": 1}).result(60)
        given = {"n": 0, "layer": {"w": freed}}
        with pytest.raises(UnsupportedError, match=r"^layer/w: the memory of the tensor was freed"):
            checkpointer.restore(given)
    assert given["n"] == 0


def test_python_values_are_replaced_and_containers_kept(tmp_path: Path) -> None:
    saved = {
        "n": 1 << 70,
        "x": math.inf,
        "pair": (1, ("a", b"b")),
        "by step": {1: "a", "1": "b"},
        "list": [None, True],
        "z": 1j,
    }
    given: dict[str, Any] = {
        "n": 0,
        "x": 0.0,
        "pair": (),
        "by step": {},
        "list": [],
        "z": 0,
        "inner": {"t": torch.zeros(2), "k": 0},
    }
    inner = given["inner"]
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, saved | {"inner": {"t": torch.ones(2), "k": 5}}).result(60)
        checkpointer.restore(given)
    assert given.pop("inner") is inner
    assert torch.equal(inner["t"], torch.ones(2))
    assert inner["k"] == 5
    assert given == saved
    assert type(given["pair"]) is tuple
    assert list(given["by step"]) == [1, "1"]


def test_tensors_that_appear_only_in_the_checkpoint_are_made_new(tmp_path: Path) -> None:
    given: dict[str, Any] = {"ema": {}}
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"ema": {"w": torch.ones(3, dtype=torch.bfloat16)}}).result(60)
        checkpointer.restore(given)
    assert torch.equal(given["ema"]["w"], torch.ones(3, dtype=torch.bfloat16))


def local_tuple() -> Any:
    Point = namedtuple("Point", "x y")
    return Point(1, torch.ones(1))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"cfg": {"dtype": object()}}, "cfg/dtype"),
        ({"a": [nn.ReLU]}, "a/0"),
        ({"f": print}, "f"),
        ({"q": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, "q"),
        ({"g": np.array([object()])}, "g"),
        ({"p": local_tuple()}, "p"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_started(value: dict[str, Any], path: str, tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        with pytest.raises(UsageError, match=f"^{path}: "):
            checkpointer.save(1, value)
        checkpointer.save(1, {"fine": torch.ones(2)}).result(60)


def test_another_shape_is_refused_by_name_before_anything_changes(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, Trainer(width=16).state()).result(60)
        other = Trainer(seed=5, width=24)
        before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
        with pytest.raises(
            MismatchError, match=r"model/0.weight: shape \[16, 8\] in the checkpoint, \[24, 8\] in the state"
        ) as caught:
            checkpointer.restore(other.state())
        assert "the state is unchanged" in caught.value.hint
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())


def test_missing_unexpected_and_mistyped_entries_are_named(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": nn.Linear(2, 2), "a": torch.zeros(1), "old": 1}).result(60)
        with pytest.raises(MismatchError) as caught:
            checkpointer.restore(
                {"model": nn.Linear(2, 2, bias=False), "a": torch.zeros(1, dtype=torch.int64), "new": 2}
            )
        for output in (
            "model/bias: in the checkpoint, but not in the state",
            "a: type float32 in the checkpoint, int64 in the state",
            "new: missing in the checkpoint",
            "old: in the checkpoint, but not in the state",
        ):
            assert output in str(caught.value)
        with pytest.raises(MismatchError, match="a: a Linear in the state, a tensor in the checkpoint"):
            checkpointer.restore({"model": nn.Linear(2, 2), "a": nn.Linear(1, 1), "old": 1})


def test_an_optimizer_over_other_parameters_is_refused(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": Trainer().optimizer}).result(60)
        with pytest.raises(
            MismatchError, match=r"o/param_groups: groups of \[6\] parameters in the checkpoint, \[2\] in the state"
        ):
            checkpointer.restore({"o": torch.optim.AdamW(nn.Linear(2, 2).parameters())})


def test_an_objects_own_refusal_comes_before_the_model_is_touched(tmp_path: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"batch_size": 8}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise MismatchError("batch_size: 8 in the checkpoint, 4 in the state")

    model = nn.Linear(2, 2)
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "loader": Picky()}).result(60)
        other = nn.Linear(2, 2)
        before = other.weight.clone()
        with pytest.raises(MismatchError, match="batch_size"):
            checkpointer.restore({"model": other, "loader": Picky()})
        assert torch.equal(other.weight, before)


def test_an_optimizers_state_keeps_its_own_type(tmp_path: Path) -> None:
    """torch's own loading would cast it to the parameter's type."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = torch.full((4,), 1 / 3)
    other = torch.optim.SGD([param], momentum=0.9)
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": optimizer}).result(60)
        checkpointer.restore({"o": other})
    assert torch.equal(other.state[param]["momentum_buffer"], torch.full((4,), 1 / 3))


def test_a_saved_step_is_not_saved_again_in_the_same_timeline(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"a": torch.zeros(2)})
        with pytest.raises(ConflictError, match="step 1 of run exp is"):
            checkpointer.save(1, {"a": torch.ones(2)})
        handle.result(60)
        with pytest.raises(ConflictError, match="is saved in this timeline"):
            checkpointer.save(1, {"a": torch.ones(2)})
        state = {"a": torch.ones(2)}
        checkpointer.save(2, state).result(60)
        assert checkpointer.restore(state, step=1) == 1
        assert checkpointer.save(2, {"a": torch.full((2,), 7.0)}).result(60).timeline == 2  # history branched off
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.restore(state) == 2
        assert torch.equal(state["a"], torch.full((2,), 7.0))


def test_a_trainer_that_was_replaced_gets_a_conflict_and_the_new_one_goes_on(store_url: str) -> None:
    state = {"a": torch.zeros(2)}
    with contextlib.ExitStack() as stack:
        zombie = stack.enter_context(Checkpointer(store_url, run="exp", sidecar=None))
        zombie.save(1, state).result(60)
        writers.is_new_process()
        heir = stack.enter_context(Checkpointer(store_url, run="exp", sidecar=None))
        assert heir.restore(state) == 1
        heir.save(2, state).result(60)
        handle = zombie.save(2, state)
        with pytest.raises(ConflictError, match="timeline 1 was taken over by timeline 2, opened by process"):
            handle.result(60)
        assert heir.save(3, state).result(60).step == 3
        assert heir.steps() == [1, 2, 3]


class Full(Wrapped):
    """A store whose disk is full while `full` is set."""

    full = True

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        if self.full:
            raise CapacityError("no space left", hint="make room")
        return self.inner.put_multipart(key, parts)


def test_a_failed_save_is_logged_raised_once_and_training_lives_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"a": torch.zeros(2)}
    with open_store(tmp_path) as inner, open_at(store := Full(inner), on_save_error="raise") as checkpointer:
        handle = checkpointer.save(1, state)
        assert handle.wait(60)
        assert [r.levelno for r in caplog.records if "step 1 was not saved" in r.getMessage()] == [logging.ERROR]
        with pytest.raises(CapacityError, match="no space left"):
            checkpointer.save(2, state)  # the handle was not asked
        store.full = False
        assert checkpointer.save(2, state).result(60).step == 2
        store.full = True
        state["a"].add_(1)
        with pytest.raises(CapacityError):
            checkpointer.save(3, state).result(60)
        store.full = False
        assert checkpointer.save(3, state).result(60).step == 3  # fetched: not raised again, and the step is free
        assert checkpointer.steps() == [2, 3]


def test_a_failed_save_does_not_stop_training_unless_that_is_asked_for(tmp_path: Path) -> None:
    state = {"a": torch.zeros(2)}
    with open_store(tmp_path) as inner:
        checkpointer = open_at(store := Full(inner))
        assert checkpointer.save(1, state).wait(60)
        store.full = False
        assert checkpointer.save(2, state).result(60).step == 2
        with pytest.raises(CapacityError, match="no space left"):
            checkpointer.close()  # here it is told to whoever never asked


def test_close_raises_errors_that_were_not_fetched(tmp_path: Path) -> None:
    with open_store(tmp_path) as inner:
        with pytest.raises(CapacityError), open_at(Full(inner)) as checkpointer:
            checkpointer.save(1, {"a": torch.zeros(2)})
        with pytest.raises(ZeroDivisionError), open_at(Full(inner), run="b") as checkpointer:
            checkpointer.save(1, {"a": torch.zeros(2)})
            _ = 1 / 0
        with pytest.raises(UsageError, match="closed"):
            checkpointer.save(2, {})


def test_a_second_save_waits_for_the_arena_within_its_bound(tmp_path: Path) -> None:
    held = threading.Event()

    class Held(Wrapped):
        def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
            assert held.wait(60)
            return self.inner.put_multipart(key, parts)

    state = {"a": torch.randn(100_000)}
    with open_store(tmp_path) as store, open_at(Held(store), timeout=0.3) as checkpointer:
        first = checkpointer.save(1, state)
        with pytest.raises(DeadlineError, match=r"still holds the staging arena after 0.3 s"):
            checkpointer.save(2, state)
        with pytest.raises(DeadlineError, match="step 1 is not committed after"):
            first.result(0.01)
        checkpointer._wait = checkpointer._saver.timeout = 60
        releaser = threading.Timer(0.2, held.set)
        releaser.start()
        second = checkpointer.save(2, state)
        assert second.stall > 0.05  # the wait counts as stall
        assert second.result(60).step == 2
        releaser.join()


def test_unchanged_state_is_saved_again_without_payload(tmp_path: Path) -> None:
    state = Trainer().state() | {"frozen": torch.randn(300_000)}
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, state).result(60)
        again = checkpointer.save(2, state).result(60)
    with open_at(tmp_path) as checkpointer:
        restarted = checkpointer.save(3, state).result(60)
    assert again.bytes_written == restarted.bytes_written == 0
    assert restarted.bytes_deduplicated >= restarted.bytes_state > 1_200_000


def test_a_damaged_checkpoint_is_reported_and_the_one_before_restored(tmp_path: Path) -> None:
    state = {"big": torch.randn(200_000)}
    with open_at(tmp_path) as checkpointer:
        first = state["big"].clone()
        checkpointer.save(1, state).result(60)
        state["big"].add_(1)
        attempt = checkpointer.save(2, state).result(60).attempt
        flip(next(tmp_path.glob(f"packs/{attempt}/*")), 1000)
        with pytest.raises(
            CorruptionError, match=rf"step 2 of run exp is damaged: tensor 'big', .* of packs/{attempt}"
        ):
            checkpointer.restore(state)
        assert checkpointer.restore(state, step=1) == 1
    assert torch.equal(state["big"], first)


class Told(Wrapper):
    """Remembers what the thread of the test asked for itself."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked = list[tuple[str, str]]()
        self._mine = threading.current_thread()

    def _through(self, operation: str, key: str, size: int, work: Any) -> Any:
        if threading.current_thread() is self._mine:
            self.asked.append((operation, key))
        return work()


@pytest.mark.parametrize("warm", [True, False])
def test_whoever_warms_up_spares_the_first_save_the_look_at_the_store(tmp_path: Path, warm: bool) -> None:
    with open_store(str(tmp_path)) as store, open_at(messages := Told(store)) as checkpointer:
        if warm:
            checkpointer.warm_up(Trainer().state())
            thread = checkpointer._saver._preparing
            assert thread is not None
            thread.join(150)
            assert messages.asked == []
        checkpointer.save(1, Trainer().state()).result(60)
        assert [key for operation, key in messages.asked if operation == "put_if_absent"][-1].startswith("runs/exp/")
        assert any(operation == "delete_many" for operation, _ in messages.asked) == (not warm), (
            "what the look left behind"
        )


def test_a_store_that_is_not_there_when_it_is_warmed_up_is_the_first_saves_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_at(tmp_path / "away") as checkpointer:
        (tmp_path / "away").write_text("no directory")
        checkpointer.warm_up(Trainer().state())
        with pytest.raises(HeadraceError, match="away"):
            checkpointer.save(1, Trainer().state())
    assert "in advance" in caplog.text


def test_a_step_that_is_not_there_and_a_bad_step_are_refused(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        assert checkpointer.restore({}) is None
        with pytest.raises(
            NotFoundError, match=f"run exp has no step 5: there is no checkpoint repository at .*{tmp_path}"
        ):
            checkpointer.restore({}, step=5)
        checkpointer.save(1, {"a": torch.zeros(1)}).result(60)
        with pytest.raises(NotFoundError, match="run exp has no step 5"):
            checkpointer.restore({"a": torch.zeros(1)}, step=5)
        for bad in (-1, "newest", 1.5):
            with pytest.raises(UsageError, match="is not a step"):
                checkpointer.save(bad, {})  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="is not a step"):
                checkpointer.restore({}, step=bad)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"'newest' is not a step .*\"latest\".* tag='newest'"):
            checkpointer.restore({}, step="newest")


def test_a_state_that_does_not_fit_is_told_how_a_part_of_it_is_restored(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2), "b": torch.ones(2)}).result(60)
        into = {"a": torch.zeros(2)}
        with pytest.raises(MismatchError, match=r"b: in the checkpoint, but not in the state .*include=.*strict=False"):
            checkpointer.restore(into)
        assert checkpointer.restore(into, strict=False) == 1
        with pytest.raises(MismatchError, match=r"shape \[2\] .*leave these entries out: exclude=\)"):
            checkpointer.restore({"a": torch.zeros(3)}, strict=False)
    assert into["a"].eq(1).all()


def test_a_mistyped_name_is_an_error_if_include_names_the_entry(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(2, 2), "step": 1}).result(60)
        state = {"modle": torch.nn.Linear(2, 2), "rng": 3}
        with pytest.raises(MismatchError, match="model: in the checkpoint, but not in the state"):
            checkpointer.restore(state, include=["model/*"])


def test_entries_that_only_one_side_has_are_logged_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_at(tmp_path) as checkpointer:
        saved = {"model": torch.ones(2), **{f"old{number}": torch.ones(1) for number in range(9)}}
        checkpointer.save(1, saved).result(60)
        checkpointer.restore({"modle": torch.zeros(2)}, strict=False)
    (line,) = (record.getMessage() for record in caplog.records if "left as they are" in record.getMessage())
    assert "in the state, not in the step: modle; in the step, not in the state: model, old0, " in line
    assert line.endswith("old6, and 2 more")


def test_bad_options_are_refused_at_once(tmp_path: Path) -> None:
    for options, says in (
        ({"compression": "lz4"}, "compression is 'lz4'"),
        ({"world_size": 2}, "init_process_group"),
        ({"rank": 3}, "rank 3 does not exist"),
        ({"run": "a/b"}, "name a run"),
        ({"keep": 3}, r"keep is 3 \(give a policy, such as Keep\(last=3\)\)"),
    ):
        with pytest.raises(UsageError, match=says):
            Checkpointer(str(tmp_path), **{"run": "exp", **options})  # type: ignore[arg-type]


def test_a_mistyped_argument_is_an_error_that_names_the_right_one() -> None:
    for argument, meant in (("compresion", "compression"), ("max_to_keep", "keep"), ("run_name", "run")):
        with pytest.raises(
            TypeError, match=rf"Checkpointer\(\) has no argument '{argument}' \(did you mean {meant}\?\)"
        ):
            Checkpointer("nowhere", **{argument: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Keep\(\) has no argument 'lest' \(did you mean last\?\)"):
        Keep(lest=3)  # type: ignore[call-arg]


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(UsageError, match="None is not a place for objects"):
        Checkpointer(None, run="exp")  # type: ignore[arg-type]


def test_a_wrapped_module_is_saved_as_the_module_itself(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"m": nn.DataParallel(model)}).result(60)
        checkpointer.restore({"m": other})
    assert torch.equal(model.weight, other.weight)


def test_unsupported_tensors_say_what_they_are(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with open_at(tmp_path) as checkpointer, pytest.raises(UnsupportedError, match="q: the tensor is of type qint8"):
        checkpointer.save(1, {"q": quantized})


class Stuttering(Wrapped):
    """COMMIT is written, and the answer lost."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        won = self.inner.put_if_absent(key, data)
        if key.endswith("COMMIT"):
            raise AmbiguousWriteError("unknown")
        return won


def test_a_save_is_reported_as_failed_only_after_the_repository_was_asked(tmp_path: Path) -> None:
    with open_store(tmp_path) as inner, open_at(Stuttering(inner)) as checkpointer:
        assert checkpointer.save(1, {"a": torch.zeros(2)}).result(60).step == 1
