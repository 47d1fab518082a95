"""Two ranks of FSDP2 under torchtitan's checkpoint manager, ours in place of its: `titan_job.py FOLDER REPO MODE`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")  # the frameworks' own

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402

from headrace.checkpoint import import_checkpoint  # noqa: E402
from headrace.checkpoint.frameworks.torchtitan import RepositoryCheckpointManager  # noqa: E402
from tests.support.ranks import in_group  # noqa: E402


class Optimizers:
    """As torchtitan's container: one flat state by names."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Trainer:
    """What torchtitan gives as "train_state"."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": b"%d" % self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state[f"dp_rank_{dist.get_rank()}"])


class Run:
    """A small model under FSDP2 with everything that torchtitan saves."""

    def __init__(self, seed: int, folder: str, repo: str, mode: str) -> None:
        """Without `repo`, torchtitan's own manager saves to `folder`."""
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 65), torch.nn.Linear(65, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.trainer, self.loader = Trainer(), Loader(seed * 10 + dist.get_rank())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        common: dict[str, Any] = {"enable": True, "interval": 2, "async_mode": mode, "last_save_model_only": False}
        kept: Any = CheckpointManager.Config(**common, keep_latest_k=0)
        if repo:
            kept = RepositoryCheckpointManager.Config(**common, url=repo, run="exp", keep_latest_k=2)
        self.manager = kept.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=Optimizers(self.model, self.optimizer),
            lr_schedulers=self.schedule,
            states={"train_state": self.trainer},
            sd_adapter=None,
            base_folder=folder,
        )

    def train(self, upto: int, last: bool) -> None:
        while self.trainer.step < upto:
            self.optimizer.zero_grad()
            self.model(torch.full((2, 64), float(self.trainer.step))).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.trainer.step += 1
            self.loader.position += 1
            self.manager.metadata = {"loss": 1 / self.trainer.step, "histogram": [1, 2]}
            self.manager.save(self.trainer.step, last_step=last and self.trainer.step == upto)
            self.manager.maybe_wait_for_staging()
        self.manager.maybe_wait_for_saving()

    def seen(self) -> dict[str, Any]:
        weights = [w.full_tensor().double().sum().item() for w in self.model.state_dict().values()]
        moments = [s["exp_avg"].full_tensor().double().sum().item() for s in self.optimizer.state.values()]
        return {
            "weights": weights,
            "moments": moments,
            "lr": self.schedule.get_last_lr(),
            "step": self.trainer.step,
            "position": self.loader.position,
        }


def continued(folder: str, repo: str) -> None:
    """torchtitan's own manager saves, the folder is imported, and ours continues."""
    first = Run(1, folder, "", "disabled")
    first.train(6, last=False)
    first.manager.close()
    if dist.get_rank() == 0:
        (saved,) = Path(folder).rglob("step-6")
        import_checkpoint(saved, repo, run="exp", step=6)
    dist.barrier()
    second = Run(2, folder + "-other", repo, "disabled")
    assert second.manager.load()
    print(json.dumps({"saved": first.seen(), "continued": second.seen()}), flush=True)
    second.manager.close()


@in_group
def main(folder: str, repo: str, mode: str) -> None:
    if mode == "import":
        continued(folder, repo)
        return
    first = Run(1, folder, repo, mode)
    assert not first.manager.load()  # nothing is there yet
    first.train(6, last=False)
    print(json.dumps({"first": first.seen()}), flush=True)
    first.train(8, last=True)
    print(json.dumps({"straight": first.seen()}), flush=True)
    first.manager.close()
    second = Run(2, folder, repo, mode)
    with pytest.raises(FileNotFoundError, match="load_step=7: run exp has no such step"):
        second.manager.load(7)
    assert second.manager.load(6)
    print(json.dumps({"loaded": second.seen()}), flush=True)
    second.train(8, last=False)
    print(json.dumps({"resumed": second.seen()}), flush=True)
    for group in second.optimizer.param_groups:
        for weight in group["params"]:
            weight.data.fill_(2)
    assert second.manager.save(8, last_step=True)  # once more
    second.manager.maybe_wait_for_saving()
    third = Run(3, folder, repo, mode)
    assert third.manager.load()
    assert all((weight.full_tensor() == 2).all() for weight in third.model.state_dict().values())
    assert third.trainer.step == 8
    third.manager.close()
    second.manager.close()
