"""An object of the state refuses its entry: the rest of the state is as it was, on all ranks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headrace.checkpoint import RNG, Checkpointer
from headrace.dataio.core.errors import MismatchError
from tests.support.ranks import launch
from tests.support.refusals import Checking, Foreign


def open_at(where: Path) -> Checkpointer:
    return Checkpointer(where, run="exp", sidecar=None)


def trained(seed: int, loader: Any, **more: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(seed):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RNG(), **more, "loader": loader}


def contents(state: dict[str, Any]) -> str:
    return str({name: copy.deepcopy(part.state_dict()) for name, part in state.items() if name != "rng"}) + str(
        torch.get_rng_state().sum()
    )


def test_a_state_that_an_object_would_refuse_changes_nothing(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, trained(3, Checking(8))).result(60)
        into = trained(2, Checking(4))
        before = contents(into)
        with pytest.raises(MismatchError, match=r"^loader: size was 8, and is 4 now") as caught:
            checkpointer.restore(into)
        assert caught.value.hint == "take 8"
        assert contents(into) == before
        into["loader"] = Checking(8)
        assert checkpointer.restore(into) == 1
        assert into["loader"].loaded == {"size": 8}
    assert into["scheduler"].last_epoch == 3


def test_it_is_asked_before_anything_is_read_unless_its_state_holds_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.checkpoint.restoring import restorer

    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, trained(3, Checking(8), big=Checking(torch.full((3,), 8)))).result(60)
        into = trained(2, Checking(8), big=Checking(torch.full((3,), 4)))
        before = contents(into)
        with pytest.raises(MismatchError, match=r"^big: size was tensor\(\[8, 8, 8\]\)"):
            checkpointer.restore(into)
        assert contents(into) == before
        monkeypatch.setattr(restorer, "apply", lambda *_: pytest.fail("the state was read"))
        with pytest.raises(MismatchError, match=r"^loader: size"):
            checkpointer.restore(trained(2, Checking(4), big=Checking(torch.full((3,), 8))))


def test_an_object_that_cannot_check_refuses_before_the_others_are_loaded(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, trained(3, Foreign(8))).result(60)
        into = trained(2, Foreign(4))
        before = contents(into)
        with pytest.raises(ValueError, match="size 8"):
            checkpointer.restore(into)
        assert contents(into) == before


def test_a_scheduler_of_another_class_leaves_optimizer_and_model_as_they_are(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, trained(3, Checking(8))).result(60)
        into = trained(2, Checking(8))
        into["scheduler"] = torch.optim.lr_scheduler.LambdaLR(into["optimizer"], lambda _: 1.0)
        before = contents(into)
        with pytest.raises(KeyError, match="lr_lambdas"):
            checkpointer.restore(into)
        assert contents(into) == before


@pytest.mark.parametrize(
    ("entry", "bad"),
    [
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("numpy", {"generator": "PCG64", "key": b"", "position": 0, "has_gauss": 0, "gauss": 0.0}),
        ("python", (9, (), None)),
    ],
)
def test_generators_check_a_state_without_loading_it(entry: str, bad: Any) -> None:
    rng = RNG()
    state = rng.state_dict()
    rng.check_state_dict(state)
    torch.rand(1), np.random.rand()
    now = rng.state_dict()
    rng.check_state_dict(state)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        rng.check_state_dict(state | {entry: bad})
    assert json.dumps(rng.state_dict(), default=str) == json.dumps(now, default=str)


@pytest.mark.process
def test_if_one_rank_refuses_no_rank_changes(tmp_path: Path) -> None:
    ranks = launch(2, "tests.support.refusals", str(tmp_path))
    output = [{line.pop("case"): line for line in lines} for lines in ranks]
    for case in ("checks, no tensors", "checks, with tensors"):
        assert [one[case] for one in output] == [
            {"raised": "MismatchError", "unchanged": True, "loaded": False},
            {"raised": "MismatchError", "unchanged": True, "loaded": False},
        ]
    assert output[0]["cannot check"] == {"raised": "TransientError", "unchanged": True, "loaded": True}
    assert output[1]["cannot check"] == {"raised": "ValueError", "unchanged": True, "loaded": False}
    assert [one["fits"]["raised"] for one in output] == [None, None]
