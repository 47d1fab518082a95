"""Small trainings that a test kills: each `train_*` module is one of them as a process, `main(folder, stop, resume)`.

Each trains for eight steps, saves after every second one, keeps one checkpoint, and resumes by the framework's own means.
A step begins when no save is in flight, so that a test knows which one it kills.
It prints the step that it resumed from and a digest of the weights at the end, which it also writes into `final.txt`.
`stop`: end after that step; `resume`: "auto" for the newest checkpoint, or the name of one.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")  # the frameworks' own

import torch  # noqa: E402
import xxhash  # noqa: E402
from torch import nn  # noqa: E402

from headrace.checkpoint import Checkpointer  # noqa: E402

STEPS, EVERY, BATCH = 8, 2, 4


def rows() -> torch.Tensor:
    """What one epoch holds: four steps."""
    return torch.randn(4 * BATCH, 6, generator=torch.Generator().manual_seed(3))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    return loss


def settle(checkpointer: Checkpointer) -> None:
    checkpointer._saves.wait_for_all(60)


def run(train: Callable[[Path, int, str], tuple[int, nn.Module]], *arguments: str) -> None:
    """`train` with the arguments of a command line."""
    folder, stop, resume = [*arguments, str(STEPS), "auto"][:3] if len(arguments) == 1 else [*arguments, "auto"][:3]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    Path(folder).mkdir(exist_ok=True)
    step, module = train(Path(folder), int(stop), resume)
    found = xxhash.xxh3_128()
    for value in module.state_dict().values():
        found.update(value.detach().numpy().tobytes())
    (Path(folder) / "final.txt").write_text(found.hexdigest())
    print(json.dumps({"resumed": step, "weights": found.hexdigest()}), flush=True)
