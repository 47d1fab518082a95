"""The adapters under the real frameworks; skipped where one is not installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint import Checkpointer
from dataio.core.errors import CorruptionError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


def framework(name: str) -> ModuleType:
    """The real package; skips with the reason where it is not installed."""
    pytest.importorskip(name, reason=f"{name} is not installed: pip install -c constraints.txt {name}")
    return importlib.import_module(f"checkpoint.frameworks.{name}")


def test_lightning_trains_on_from_a_checkpoint_in_the_repository(tmp_path: Path) -> None:
    ours = framework("lightning")
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)

    def trained(steps: int, resume: str | None, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        module = Module()
        plugin = ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None)
        trainer = L.Trainer(
            max_steps=steps, plugins=[plugin], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(tmp_path / "names" / "a.ckpt")
            trainer.save_checkpoint(tmp_path / "names" / "last.ckpt")
        plugin.close()
        return trainer, module

    _, first = trained(6, None, 0)
    assert (tmp_path / "names" / "last.ckpt").stat().st_size < 100  # a name, not a checkpoint
    resumed, same = trained(6, str(tmp_path / "names" / "last.ckpt"), 5)  # nothing left to train
    assert torch.equal(same.layer.weight, first.layer.weight)
    resumed, module = trained(8, str(tmp_path / "names" / "a.ckpt"), 5)
    assert resumed.global_step == 8
    assert not torch.equal(module.layer.weight, first.layer.weight)
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [6]


def test_a_name_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    ours = framework("lightning")
    plugin = ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None)
    (tmp_path / "bad.ckpt").write_text("[]")
    with pytest.raises(CorruptionError, match="does not name a step"):
        plugin.load_checkpoint(tmp_path / "bad.ckpt")
    with pytest.raises(UsageError, match="no checkpoint named"):
        plugin.load_checkpoint(tmp_path / "absent.ckpt")
    plugin.close()


def test_a_transformers_trainer_goes_on_where_it_saved(tmp_path: Path) -> None:
    ours = framework("transformers")
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"x": torch.full((4,), float(i))}

    def trained(steps: int) -> tuple[Any, Any]:
        model = Model()
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=steps,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
            trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[ours.RepositoryCallback(checkpointer)])
            trainer.train()
        with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
            return trainer.state.global_step, checkpointer.steps()

    assert trained(4) == (4, [2, 4])
    assert trained(7) == (7, [2, 4, 6, 7])


def test_accelerate_keeps_its_models_in_the_repository(tmp_path: Path) -> None:
    ours = framework("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(nn.Linear(4, 2), torch.optim.AdamW(nn.Linear(4, 2).parameters()))
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
        ours.attach(accelerator, checkpointer)
        saved = model.weight.detach().clone()
        accelerator.save_state(str(tmp_path / "step_12"))
        assert not list((tmp_path / "step_12").glob("*model*"))
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state(str(tmp_path / "step_12"))
        assert torch.equal(model.weight, saved)
        assert checkpointer.steps() == [12]
        with pytest.raises(UsageError, match="names no step"):
            accelerator.save_state(str(tmp_path / "latest"))
