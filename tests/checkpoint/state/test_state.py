"""What goes into a checkpoint besides plain dense tensors, and restoring only some of it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import chunk_reader
from headrace.dataio.core.errors import CorruptionError, MismatchError, UsageError
from tests.support.refusals import Checking


def open_at(where: Path, run: str = "exp", **options: Any) -> Checkpointer:
    return Checkpointer(str(where), run=run, sidecar=None, **options)


def there_and_back(where: Path, state: dict[str, Any], into: dict[str, Any], **how: Any) -> Any:
    """Save, restore into another state; what the save said."""
    with open_at(where) as checkpointer:
        result = checkpointer.save(1, state).result(60)
        checkpointer.restore(into, **how)
    return result


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(500, 64), "head": nn.Linear(64, 500, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    first, second = tied(1), tied(2)
    result = there_and_back(tmp_path, {"model": first}, {"model": second})
    assert result.bytes_state == 500 * 64 * 4
    assert torch.equal(second.get_parameter("head.weight"), first.get_parameter("head.weight"))
    assert second["head"].weight is second["embed"].weight


def test_views_that_overlap_are_stored_once_and_share_their_memory_again(tmp_path: Path) -> None:
    base = torch.arange(100_000, dtype=torch.float32)
    state = {
        "x": {"all": base, "t": base.view(250, 400).t(), "part": base[10:90_000:3], "bits": base.view(torch.int32)[7:]}
    }
    into: dict[str, Any] = {"x": {"all": torch.zeros(100_000), "t": torch.zeros(400, 250), "part": torch.zeros(29_997)}}
    into["x"]["bits"] = torch.zeros(99_993, dtype=torch.int32)
    result = there_and_back(tmp_path, state, into)
    assert result.bytes_state == 400_000
    for name, tensor in state["x"].items():
        assert torch.equal(into["x"][name], tensor)
    plain: dict[str, Any] = {"x": None}
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore(plain)  # made anew
    plain["x"]["all"][10] = -5
    assert plain["x"]["part"][0] == -5
    assert plain["x"]["t"][10, 0] == -5


def test_views_far_apart_in_their_memory_do_not_drag_all_of_it_along(tmp_path: Path) -> None:
    base = torch.arange(1_000_000.0)
    state = {"x": {"column": base.view(1000, 1000)[:, 0], "row": base.view(1000, 1000)[3]}}
    into = {"x": {"column": torch.zeros(1000), "row": torch.zeros(1000)}}
    assert there_and_back(tmp_path, state, into).bytes_state == 8000
    assert all(torch.equal(into["x"][name], state["x"][name]) for name in into["x"])


def sparse(kind: str) -> torch.Tensor:
    dense = torch.zeros(6, 8)
    dense[1, 2], dense[5, 7], dense[4, 0] = 1.5, math.pi, -2
    if kind in ("bsr", "bsc"):
        return dense.to_sparse(layout=getattr(torch, f"sparse_{kind}"), blocksize=(2, 2))
    return dense.to_sparse(layout=getattr(torch, f"sparse_{kind}"))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_comes_back_in_place_and_anew(kind: str, tmp_path: Path) -> None:
    tensor = sparse(kind)
    here = sparse(kind)
    here.values().mul_(0) if kind != "coo" else here._values().mul_(0)
    into: dict[str, Any] = {"here": here, "anew": None}
    there_and_back(tmp_path, {"here": tensor, "anew": {"s": tensor}}, into)
    assert into["here"] is here
    for found in (into["here"], into["anew"]["s"]):
        assert found.layout == tensor.layout
        assert torch.equal(found.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_takes_another_number_of_elements(tmp_path: Path) -> None:
    into = {"s": torch.zeros(6, 8).to_sparse()}
    there_and_back(tmp_path, {"s": sparse("coo")}, into)
    assert torch.equal(into["s"].to_dense(), sparse("coo").to_dense())


class Packed(torch.Tensor):
    """A quantised tensor in the way of torchao's: a subclass around packed integers and scales."""

    data_: torch.Tensor
    scale_: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, (data.shape[0], data.shape[1] * 2))

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale_ = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Packed:
        return cls(inner["data_"], inner["scale_"])

    @classmethod  # torch's stub declares it without `cls` and `func`
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(str(func))


def test_a_packed_quantised_tensor_is_filled_in_place_and_never_made_by_name(tmp_path: Path) -> None:
    state = {"q": Packed(torch.randint(0, 255, (30, 40), dtype=torch.uint8), torch.rand(30))}
    into: dict[str, Any] = {"q": Packed(torch.zeros(30, 40, dtype=torch.uint8), torch.zeros(30))}
    there_and_back(tmp_path, state, into)
    assert torch.equal(into["q"].data_, state["q"].data_)
    assert torch.equal(into["q"].scale_, state["q"].scale_)
    with open_at(tmp_path) as checkpointer, pytest.raises(MismatchError, match=r"q: a tensor of kind wrapper:.*Packed"):
        checkpointer.restore({"q": None})


def test_a_tensor_on_the_meta_device_is_remembered_as_one(tmp_path: Path) -> None:
    state = {"m": torch.empty(3, 4, device="meta"), "w": torch.ones(2)}
    into = {"m": torch.empty(3, 4, device="meta"), "w": torch.zeros(2)}
    there_and_back(tmp_path, state, into)
    assert torch.equal(into["w"], torch.ones(2))
    with (
        open_at(tmp_path) as checkpointer,
        pytest.raises(MismatchError, match="a meta tensor in the checkpoint"),
    ):
        checkpointer.restore({"m": torch.zeros(3, 4), "w": torch.zeros(2)})


@pytest.mark.filterwarnings("ignore")
def test_an_affine_quantised_tensor_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.quint8)
    with open_at(tmp_path) as checkpointer, pytest.raises(UsageError, match=r"^q: .*int_repr\(\)"):
        checkpointer.save(1, {"q": tensor})


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.builds(lambda n, s: torch.arange(float(n * 2))[s:].clone(), st.integers(1, 9), st.integers(0, 1))
    | st.builds(lambda n: torch.ones(n, 3, dtype=torch.bfloat16).t(), st.integers(0, 4))
)
STATES = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=3) | st.integers(0, 99), inner, max_size=3)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


def blank(value: Any) -> Any:
    """The same shape with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank(item) for item in value)
    return None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=STATES)
def test_any_nested_state_comes_back(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    before, into = copy.deepcopy(state), blank(state)
    there_and_back(tmp_path_factory.mktemp("repo"), state, into)
    assert same(state, before)
    assert same(into, before)


def test_two_tensors_of_one_name_are_refused_and_names_that_only_look_alike_are_kept_apart(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer, pytest.raises(UsageError, match="two entries of the state are both called"):
        checkpointer.save(1, {"d": {1: torch.ones(1), "1": torch.zeros(1)}})
    state = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1), "a.b": torch.full((1,), 2.0), "d": {1: "i", "1": "s"}}
    into = blank(state)
    there_and_back(tmp_path / "alike", state, into)
    assert same(into, state)


def model(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"body": nn.Linear(5, 5), "head": nn.Linear(5, 2)})


def test_only_what_is_selected_is_restored(tmp_path: Path) -> None:
    saved, into = model(1), model(2)
    untouched = copy.deepcopy(into.state_dict())
    given_state = {"model": saved, "step": 7, "rest": {"a": 1, "b": torch.ones(2)}}
    state: dict[str, Any] = {"model": into, "step": 0, "rest": {"a": 0, "b": torch.zeros(2)}}
    there_and_back(tmp_path, given_state, state, include=["model/body*", "rest/a"], exclude="*bias")
    assert torch.equal(into.get_parameter("body.weight"), saved.get_parameter("body.weight"))
    assert torch.equal(into.get_parameter("body.bias"), untouched["body.bias"])
    assert torch.equal(into.get_parameter("head.weight"), untouched["head.weight"])
    assert (state["step"], state["rest"]["a"], state["rest"]["b"].sum().item()) == (0, 1, 0)


def test_what_only_one_side_has_is_an_error_or_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved: dict[str, Any] = {"model": model(1), "old": 1}
    into: dict[str, Any] = {"model": model(2), "new": torch.ones(3)}
    into["model"]["adapter"] = nn.Linear(5, 1)
    adapter = into["model"]["adapter"].weight.detach().clone()
    with pytest.raises(MismatchError, match=r"new: missing in the checkpoint"):
        there_and_back(tmp_path, saved, into)
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore(into, strict=False)
    assert torch.equal(into["model"]["head"].weight, saved["model"]["head"].weight)
    assert torch.equal(into["model"]["adapter"].weight, adapter)
    assert torch.equal(into["new"], torch.ones(3))
    assert "model/adapter.weight" in caplog.text


def test_another_type_is_an_error_or_converted(tmp_path: Path) -> None:
    saved, into = model(1), model(2).bfloat16()
    with pytest.raises(MismatchError, match="type float32 in the checkpoint, bfloat16 in the state"):
        there_and_back(tmp_path, {"model": saved}, {"model": into})
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore({"model": into}, cast=True)
    assert torch.equal(into.get_parameter("head.weight"), saved.get_parameter("head.weight").bfloat16())


def test_another_run_is_restored_without_becoming_this_runs_past(tmp_path: Path) -> None:
    saved, into = model(1), model(2)
    with open_at(tmp_path, "pretraining") as checkpointer:
        checkpointer.save(900, {"model": saved}).result(60)
    with open_at(tmp_path, "tuning") as checkpointer:
        assert checkpointer.restore({"model": into}, run="pretraining") == 900
        assert torch.equal(into.get_parameter("head.weight"), saved.get_parameter("head.weight"))
        checkpointer.save(1, {"model": into}).result(60)
        assert checkpointer.steps() == [1]


def test_a_pattern_that_takes_nothing_is_an_error_before_anything_is_changed(tmp_path: Path) -> None:
    saved = {"model": model(1), "step": 7}
    into: dict[str, Any] = {"model": model(2), "step": 0}
    with pytest.raises(UsageError, match=r"without a match: 'optim/\*'"):
        there_and_back(tmp_path, saved, into, include=["step", "optim/*"])
    assert into["step"] == 0
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore(into, include=["step", "optim/*"], strict=False)
    assert into["step"] == 7


@pytest.mark.parametrize("pattern", ["optimizer", "optimizer/", "optimizer/*", "opt*/*"])
def test_a_pattern_below_an_object_that_loads_its_own_state_names_the_object(pattern: str, tmp_path: Path) -> None:
    saved, into = model(1), model(2)
    wanted, kept = (torch.optim.SGD(one.parameters(), lr=rate) for one, rate in ((saved, 0.5), (into, 0.25)))
    given_state, state = {"model": saved, "optimizer": wanted}, {"model": into, "optimizer": kept}
    there_and_back(tmp_path, given_state, state, exclude=pattern)
    assert kept.param_groups[0]["lr"] == 0.25
    assert torch.equal(into.get_parameter("head.weight"), saved.get_parameter("head.weight"))
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore({"model": into}, exclude=pattern)  # it need not be in the state
        checkpointer.restore({"optimizer": kept}, include=pattern)
    assert kept.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("pattern", ["loadr", "optimizer/state/*"])
def test_an_excluded_pattern_that_matches_nothing_is_an_error_before_anything_is_changed(
    pattern: str, tmp_path: Path
) -> None:
    saved = {"optimizer": torch.optim.SGD(model(1).parameters(), lr=0.5), "loader": 7}
    into: dict[str, Any] = {"optimizer": torch.optim.SGD(model(1).parameters(), lr=0.25), "loader": 0}
    with pytest.raises(
        UsageError, match=rf"exclude has patterns without a match: '{pattern}'".replace("*", r"\*")
    ) as caught:
        there_and_back(tmp_path, saved, into, exclude=[pattern])
    assert "--tensors" in (caught.value.hint or "")
    assert into["loader"] == 0
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore(into, exclude=pattern, strict=False)
    assert into["loader"] == 7


def test_force_reaches_the_objects_that_can_be_forced_and_no_others(tmp_path: Path) -> None:
    class Loader(Checking):
        def load_state_dict(self, state: dict[str, Any], *, force: bool = False) -> None:
            self.loaded = state | {"force": force}

    saved: dict[str, Any] = {"train": Loader(8), "other": Checking(8)}
    into: dict[str, Any] = {"train": Loader(4), "other": Checking(8)}
    with pytest.raises(MismatchError, match=r"^train: size was 8"):
        there_and_back(tmp_path, saved, into)
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore(into, force="train")
        assert into["train"].loaded == {"size": 8, "force": True}
        checkpointer.restore({"train": Loader(8), "other": into["other"]})
        with pytest.raises(UsageError, match="force has patterns without a match: 'other'") as caught:
            checkpointer.restore(into, force=["train", "other"])
        assert "such as a loader" in (caught.value.hint or "")


@pytest.mark.parametrize("patterns", [[""], [7], ["a"] * 1001, 3])
def test_bad_patterns_are_refused(patterns: Any, tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer, pytest.raises(UsageError, match="patterns must be strings"):
        checkpointer.restore({}, include=patterns)


def test_a_view_that_reaches_out_of_its_bytes_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.arange(1000.0)
    real = chunk_reader.tensors_of

    def shorter(step: Step, rank: int) -> Any:
        found = real(step, rank)
        return {name: chunk_reader.Saved(name, s.dtype, (s.shape[0] - 1,), s.shards) for name, s in found.items()}

    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": [base, base[5:]]}).result(60)
        monkeypatch.setattr(chunk_reader, "tensors_of", shorter)
        with pytest.raises(CorruptionError, match="reaches outside tensor"):
            checkpointer.restore({"x": None})
