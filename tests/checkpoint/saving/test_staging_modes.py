"""What is saved is the state as it was when `save` was called, in every mode of staging, while training goes on."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.saver import Saver
from headrace.checkpoint.saving import copying
from headrace.dataio.core.errors import CapacityError, UsageError
from headrace.dataio.core.limits import MIB
from tests.support.staging_trainer import Training, equal
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

MODES = ("eager", "lazy")


class Gate:
    """Holds the threads that copy late pieces until it is opened; counts the pieces that came to it. `held`: the trainer too."""

    @staticmethod
    def is_late(source: torch.Tensor) -> bool:
        """Whether the tensor is a parameter or a moment: these are matrices."""
        return source.ndim == 2

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.held, self.came, self.armed = threading.Event(), threading.Event(), 0, False
        inner, counted = copying._copy, copying.Copying._counted

        def slow(arena: Any, part: Any) -> None:
            sources = part.tensors if hasattr(part, "tensors") else [part.tensor]
            if (
                any(map(Gate.is_late, sources))
                and self.armed
                and threading.current_thread().name.startswith("headrace-stage")
            ):
                self.came += 1
                assert self.opened.wait(150)
            inner(arena, part)

        def holding(a_copy: copying.Copying) -> Any:
            self.held.set()
            return counted(a_copy)

        monkeypatch.setattr(copying, "_copy", slow)
        monkeypatch.setattr(copying.Copying, "_counted", holding)


def restored(url: Path, step: int, seed: int) -> Training:
    other = Training(seed + 1000)
    with Checkpointer(str(url), run="exp", sidecar=None) as checkpointer:
        assert checkpointer.restore(other.state, step) == step
    return other


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), before=st.integers(1, 3), after=st.integers(0, 2))
def test_what_is_restored_equals_a_copy_made_with_the_world_stopped(
    mode: str, seed: int, before: int, after: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url, training, copies = tmp_path_factory.mktemp("run"), Training(seed), {}
    with Checkpointer(str(url), run="exp", sidecar=None, staging=mode) as checkpointer:
        for step in range(1, before + after + 2):
            training.forward_backward()
            training.step()
            if step >= before:
                copies[step] = training.snapshot()
                handle = checkpointer.save(step, training.state)
        training.forward_backward()  # concurrent with the copy of the last save
        training.step()
        handle.result(60)
    for step, wanted in copies.items():
        assert equal(restored(url, step, seed).snapshot(), wanted), step


def test_a_step_of_the_optimizer_waits_for_what_is_not_copied_and_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(5)
    training.forward_backward()
    training.step()
    gate = Gate(monkeypatch)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, staging="lazy") as checkpointer:
        gate.armed = True
        wanted = training.snapshot()
        handle = checkpointer.save(1, training.state)
        training.forward_backward()
        assert not equal(training.snapshot(), wanted)  # running means and generators have moved on
        assert not handle.done
        wait_for(lambda: gate.came)  # else the trainer would find nothing under way, and copy all of it itself
        opener = threading.Thread(target=lambda: gate.held.wait(60) and not time.sleep(0.3) and gate.opened.set())
        opener.start()
        training.step()  # weights change here, and only after the copy
        assert gate.opened.is_set()
        opener.join(60)
        result = handle.result(60)
    assert 0.25 < result.wait_seconds < 60
    assert result.wait_seconds == handle.wait_seconds
    assert equal(restored(tmp_path, 1, 5).snapshot(), wanted)


def test_a_lazy_save_copies_before_it_returns_only_what_no_optimizer_governs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(6)
    training.forward_backward()
    training.step()
    gate = Gate(monkeypatch)
    names: list[tuple[str, ...]] = []
    inner = copying.Copying.__init__

    def spy(self: Any, pool: Any, arena: Any, *, specs: Any, late: Any = (), **given: Any) -> None:
        names.append(tuple(spec.name for i, spec in enumerate(specs) if i not in late))
        inner(self, pool, arena, specs=specs, late=late, **given)

    monkeypatch.setattr(copying.Copying, "__init__", spy)
    monkeypatch.setattr(copying, "LATE_BYTES", 0)
    gate.opened.set()
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, staging="lazy") as checkpointer:
        checkpointer.save(1, training.state).result(60)
    kinds = {name.split("/")[0] + ":" + name.split("/")[-1].split(".")[-1] for name in names[0]}
    assert not [n for n in names[0] if "exp_avg" in n or n.endswith(("weight", "bias"))], names
    assert any("running_mean" in kind for kind in kinds), kinds
    assert any(name.startswith("loader") for name in names[0])
    assert any(name.startswith("rng") for name in names[0])


def test_a_manual_change_during_a_lazy_copy_fails_the_save_instead_of_mixing_two_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(7)
    gate = Gate(monkeypatch)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, staging="lazy") as checkpointer:
        gate.armed = True
        handle = checkpointer.save(1, training.state)
        with torch.no_grad():
            training.model.get_parameter("0.weight").mul_(2)
        gate.opened.set()
        with pytest.raises(UsageError, match=r"model.*0.weight.* was written while it was being copied"):
            handle.result(60)
        gate.armed = False
        after = checkpointer.save(2, training.state)  # and the next one is fine
        after.copied(60)
        with torch.no_grad():
            training.model.get_parameter("0.weight").mul_(2)
        after.result(60)
        assert checkpointer.steps() == [2]


def test_a_manual_change_of_a_parameter_that_is_saved_with_a_view_of_it_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.zeros(copying.LATE_BYTES))
    state = {"weight": weight, "view": weight.detach()[1:], "optimizer": torch.optim.SGD([weight])}
    gate = Gate(monkeypatch)
    monkeypatch.setattr(Gate, "is_late", staticmethod(lambda source: source.nbytes >= weight.nbytes))
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, staging="lazy") as checkpointer:
        gate.armed = True
        handle = checkpointer.save(1, state)
        wait_for(lambda: gate.came)
        with torch.no_grad():
            weight.add_(1)
        gate.opened.set()
        with pytest.raises(UsageError, match="was written while it was being copied"):
            handle.result(60)


def test_parameters_without_an_optimizer_in_the_state_are_copied_before_save_returns(tmp_path: Path) -> None:
    training = Training(8)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, staging="lazy") as checkpointer:
        state = {"model": training.model}
        wanted = training.model.get_parameter("0.weight").detach().clone()
        handle = checkpointer.save(1, state)
        with torch.no_grad():
            training.model.get_parameter("0.weight").mul_(2)
        handle.result(60)
        checkpointer.restore(state)
        assert torch.equal(training.model.get_parameter("0.weight"), wanted)


def test_hooks_end_with_the_checkpointer(tmp_path: Path) -> None:
    training = Training(9)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, staging="lazy") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, training.state)
        assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    assert not training.optimizer._optimizer_step_pre_hooks


def big_state(seed: int, mib: int = 100) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = mib * MIB // 4 // 1000
    large = torch.randn(rows // 2, 1000, generator=generator)
    return {
        "a": large,
        "turned": torch.randn(1000, rows // 2, generator=generator).t(),
        "small": torch.arange(100.0),
        "odd": torch.randint(0, 255, (70_001,), dtype=torch.uint8, generator=generator),
        "none": torch.empty(0),
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_state_larger_than_the_memory_for_it_is_saved_in_slices(mode: str, tmp_path: Path) -> None:
    state = big_state(1)
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    with Checkpointer(
        str(tmp_path), run="exp", sidecar=None, staging=mode, staging_bytes=64 * MIB, timeout=60
    ) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(step, state)
            handle.copied(60)
            assert checkpointer._saver.staging._arena is not None
            assert checkpointer._saver.staging._arena.size == 64 * MIB
            state["a"].add_(1)
            result = handle.result(60)
            assert result.sliced
            assert result.committed_by == "process"
            if step == 1:
                assert result.bytes_written == result.bytes_state
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert checkpointer.restore(into, 1) == 1
        assert all(torch.equal(into[name], wanted[name]) for name in wanted)
        assert checkpointer.restore(into, 2) == 2
        assert torch.equal(into["a"], wanted["a"] + 1)


def test_a_store_that_fails_lets_go_of_a_save_in_slices(tmp_path: Path) -> None:
    state = big_state(2)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, staging_bytes=64 * MIB) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)}).result(60)
        (tmp_path / "packs").rename(tmp_path / "away")
        (tmp_path / "packs").write_text("in the way")
        handle = checkpointer.save(2, state)  # returns, though the slices are not taken away
        with pytest.raises(Exception, match="packs"):
            handle.result(60)
        (tmp_path / "packs").unlink()
        (tmp_path / "away").rename(tmp_path / "packs")
        assert checkpointer.save(3, state).result(60).step == 3


def test_too_little_memory_for_slices_is_refused_with_the_least_that_works(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"64\.0 MiB or more"):
        Checkpointer(str(tmp_path), run="exp", sidecar=None, staging_bytes=1 * MIB)


def test_a_warm_arena_is_the_one_that_the_first_save_uses(tmp_path: Path) -> None:
    training = Training(10)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        checkpointer.warm_up(training.state)
        handle = checkpointer.save(1, training.state)
        first = checkpointer._saver.staging._arena
        handle.result(60)
        checkpointer.warm_up(training.state)
        checkpointer.save(2, training.state).result(60)
        assert checkpointer._saver.staging._arena is first


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose one of: eager, lazy"):
        Checkpointer(str(tmp_path), run="exp", staging="sometimes")


@pytest.mark.parametrize(("staging", "limit"), [("lazy", None), ("lazy", 64 * MIB)])
def test_a_save_that_cannot_begin_leaves_no_thread_at_work_on_the_state(
    staging: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work: list[float] = []

    def slowly(*given: Any) -> None:
        time.sleep(0.02)
        at_work.append(time.monotonic())
        copy(*given)

    def refused(*_: object) -> None:
        raise CapacityError("no room for a plan")

    copy = copying._copy
    monkeypatch.setattr(copying, "_copy", slowly)
    monkeypatch.setattr(Saver, "_plan", refused)
    big = torch.nn.Linear(4096, 6000)  # 94 MiB
    optimizer = torch.optim.SGD(big.parameters())
    with Checkpointer(
        str(tmp_path), run="exp", sidecar=None, staging=staging, staging_bytes=limit, timeout=30
    ) as checkpointer:
        with pytest.raises(CapacityError):
            checkpointer.save(1, {"model": big, "optimizer": optimizer})
        ended = time.monotonic()
        time.sleep(0.1)
        assert not [at for at in at_work if at > ended]
        assert not [thread for thread in threading.enumerate() if thread.name == "headrace-slices"]


def test_all_memory_of_optimizers_and_frozen_parameters_is_copied_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "LATE_BYTES", 0)
    layer = torch.nn.Linear(8, 8)
    layer.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([layer.weight])
    layer(torch.ones(8)).sum().backward()
    optimizer.step()
    average = optimizer.state[layer.weight]["exp_avg"]
    tensors = [layer.weight.detach(), average, average.view(-1)[:2], layer.bias.detach(), torch.ones(8), torch.ones(0)]
    assert copying.late_tensors({"model": layer, "list": [optimizer]}, tensors) == {0, 1, 2, 3}
    assert copying.late_tensors({"model": layer}, tensors) == frozenset()


def test_small_tensors_are_copied_before_a_lazy_save_returns() -> None:
    small, large = torch.zeros(copying.LATE_BYTES // 4 - 1), torch.zeros(copying.LATE_BYTES // 4)
    state = {"optimizer": torch.optim.SGD([small.requires_grad_(), large.requires_grad_()])}
    assert copying.late_tensors(state, [small.detach(), large.detach()]) == {1}


def test_the_state_is_released_before_the_thread_that_commits_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made:
        """Makes a new tensor for each save, as modules do."""

        made: weakref.ref[torch.Tensor] | None = None

        def state_dict(self) -> dict[str, torch.Tensor]:
            tensor = torch.ones(3)
            self.made = weakref.ref(tensor)
            return {"x": tensor}

        def load_state_dict(self, state: object) -> None:
            raise AssertionError("never called")

    made, alive = Made(), list[bool]()
    commit = Saver._commit_staged

    def observed(self: Saver, *given: Any) -> None:
        alive.append(made.made is not None and made.made() is not None)
        commit(self, *given)

    monkeypatch.setattr(Saver, "_commit_staged", observed)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"made": made}).result(60)
    assert alive == [False]
