"""Metrics of frameworks as metadata: scalars are taken, anything else is left out, and nothing fails."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.frameworks.metrics import scalars


def test_scalars_are_taken_and_other_values_are_left_out() -> None:
    found = scalars(
        {
            "loss": torch.tensor(2.5),
            "epoch": 3,
            "note": "x",
            "nan": math.nan,
            "none": None,
            "many": torch.zeros(2),
            "list": [1],
            "meta": torch.zeros(1, device="meta"),
            "bad\nname": 1,
        }
    )
    assert repr(found) == repr({"loss": 2.5, "epoch": 3, "note": "x", "nan": math.nan})


def test_more_metrics_than_can_be_stored_are_cut() -> None:
    assert len(scalars({f"metric{i}": i for i in range(200)})) == step_metadata.MAX_ENTRIES


def test_lightning_s_monitored_metrics_are_found_in_its_checkpoint() -> None:
    lightning = pytest.importorskip("headrace.checkpoint.frameworks.lightning")
    callbacks = {
        "ModelCheckpoint{'monitor': 'val_loss'}": {"monitor": "val_loss", "current_score": torch.tensor(0.5)},
        "ModelCheckpoint{'monitor': None}": {"monitor": None, "current_score": None},
        "EarlyStopping": {"wait_count": 0},
    }
    assert lightning.metrics_of({"epoch": 2, "callbacks": callbacks}) == {"epoch": 2, "val_loss": 0.5}
    assert lightning.metrics_of({}) == {}
