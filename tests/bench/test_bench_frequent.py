"""`headrace bench frequent` saves after every step, and its killed trainers restore the values of their step."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.workloads import frequent


@pytest.mark.parametrize("name", [frequent.LAZY, frequent.EAGER, frequent.DCP])
def test_every_step_is_saved_and_becomes_durable(name: str, tmp_path: Path) -> None:
    figures = frequent.measure(name, str(tmp_path), 16, 0.0, 3)
    assert figures["durable"] == 1
    assert figures["behind_max"] <= 3
    assert set(figures) == set(frequent.METRICS)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_killed_trainers_lose_few_steps(tmp_path: Path) -> None:
    figures = frequent.measure_kills(str(tmp_path), 4, 0.02, 4)
    assert figures["kills"] == 4
    assert figures["steps_lost_max"] >= figures["steps_lost_mean"] >= 0
    assert set(figures) == set(frequent.KILL_METRICS)


def test_a_trainer_that_restores_other_values_is_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second trainer expects other values, since the tensors of the first one began elsewhere."""
    from headrace.checkpoint import Checkpointer

    with Checkpointer(tmp_path / "checkpoints", run="r", sidecar=None) as checkpointer:
        import torch

        tensors = {f"layer_{n}": torch.full((1 << 18,), 7.0) for n in range(4)}
        optimizer = torch.optim.SGD(list(tensors.values()), lr=1.0, foreach=True)
        checkpointer.save(3, {"model": tensors, "optimizer": optimizer}).result()
    with pytest.raises(RuntimeError, match="a trainer failed"):
        frequent.measure_kills(str(tmp_path), 4, 0.02, 2)
    assert "step 3 was restored with other values" in capfd.readouterr().err
