"""Small trainings under the real frameworks, as processes that a test kills: `main(kind, folder, stop, resume)`.

Each trains for eight steps, saves after every second one, keeps one checkpoint, and resumes by the framework's own means.
A step begins when no save is in flight, so that a test knows which one it kills.
It prints the step that it resumed from and a digest of the weights at the end. `stop`: end after that step; `resume`:
"auto" for the newest checkpoint, or the name of one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")  # the frameworks' own

import accelerate  # noqa: E402
import lightning  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import xxhash  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from torch import nn  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from checkpoint import Checkpointer  # noqa: E402
from checkpoint.frameworks.accelerate import attach  # noqa: E402
from checkpoint.frameworks.lightning import RepositoryIO  # noqa: E402
from checkpoint.frameworks.transformers import RepositoryTrainer  # noqa: E402

STEPS, EVERY, BATCH = 8, 2, 4
for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
    logging.getLogger(name).setLevel(logging.ERROR)


def rows() -> torch.Tensor:
    """What one epoch holds: four steps."""
    return torch.randn(4 * BATCH, 6, generator=torch.Generator().manual_seed(3))


def digest(module: nn.Module) -> str:
    found = xxhash.xxh3_128()
    for value in module.state_dict().values():
        found.update(value.detach().numpy().tobytes())
    return found.hexdigest()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def settle(checkpointer: Checkpointer) -> None:
    checkpointer._saves.wait_for_all(60)


class Heard(Callback):  # type: ignore[misc, unused-ignore]
    def __init__(self, plugin: RepositoryIO) -> None:
        self.plugin, self.step = plugin, 0

    def on_train_batch_start(self, *_: Any) -> None:
        settle(self.plugin._checkpointer)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.step = int(checkpoint["global_step"])


def with_lightning(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    plugin = RepositoryIO(str(folder / "repo"), run="exp", sidecar=None)
    keeps = ModelCheckpoint(
        folder / "names", filename="{step}", every_n_train_steps=EVERY, save_top_k=1, monitor=None, save_last=True
    )
    heard = Heard(plugin)
    trainer = lightning.Trainer(
        max_steps=stop, callbacks=[keeps, heard], plugins=[plugin], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    module = Module()
    path = "last" if resume == "auto" else folder / "names" / resume
    whole = rows()[: EVERY * BATCH]  # Lightning goes on at the beginning of an epoch with a loader that has no state
    trainer.fit(module, torch.utils.data.DataLoader(whole, batch_size=BATCH), ckpt_path=path)
    plugin.close()
    return heard.step, module.net


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(net(), nn.Dropout(0.2))  # the generators must be those of the step, too

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x.sum(1, keepdim=True)).square().mean()}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": rows()[i]}


class Told(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    def __init__(self, stop: int, checkpointer: Checkpointer) -> None:
        self.stop, self.step, self.checkpointer = stop, 0, checkpointer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        settle(self.checkpointer)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = state.global_step >= self.stop


def with_transformers(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    out = folder / "names"
    out.mkdir(exist_ok=True)
    arguments = transformers.TrainingArguments(
        str(out), max_steps=STEPS, save_steps=EVERY, save_total_limit=1, per_device_train_batch_size=BATCH,
        learning_rate=0.05, report_to=[], use_cpu=True, disable_tqdm=True, seed=7,
    )  # fmt: skip
    model = Model()
    with Checkpointer(str(folder / "repo"), run="exp", sidecar=None) as checkpointer:
        told = Told(stop, checkpointer)
        trainer = RepositoryTrainer(model, arguments, train_dataset=Rows(), callbacks=[told], checkpointer=checkpointer)
        path = get_last_checkpoint(str(out)) if resume == "auto" else str(out / resume)
        with contextlib.redirect_stdout(open(os.devnull, "w")):  # it prints its metrics
            trainer.train(resume_from_checkpoint=path)
    return told.step, model


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def with_accelerate(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    settings = accelerate.utils.ProjectConfiguration(
        str(folder / "names"), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator, module, progress = accelerate.Accelerator(cpu=True, project_config=settings), net(), Progress()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.05))
    accelerator.register_for_checkpointing(progress)
    with Checkpointer(str(folder / "repo"), run="exp", sidecar=None) as checkpointer:
        attach(accelerator, checkpointer)
        there = list((folder / "names" / "checkpoints").glob("checkpoint_*"))
        if there:
            accelerator.load_state()
            settings.iteration = progress.step // EVERY
        first = progress.step
        while progress.step < stop:
            settle(checkpointer)
            batch = torch.randn(BATCH, 6)  # of the global generator
            accelerator.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % EVERY == 0:
                accelerator.save_state()
    return first, module


KINDS = {"lightning": with_lightning, "transformers": with_transformers, "accelerate": with_accelerate}


def main(kind: str, folder: str, stop: str = str(STEPS), resume: str = "auto") -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    step, module = KINDS[kind](Path(folder), int(stop), resume)
    print(json.dumps({"resumed": step, "weights": digest(module)}), flush=True)
