"""A training under Accelerate on a loader of latents: `accelerate_run URL FOLDER STEPS KIND [KILL_AFTER]`.

Every second step is saved. A training continues at the newest saved step. It appends the keys of each batch to
`FOLDER/seen-<rank>`. KIND is "files" for Accelerate's own checkpoints, or "repository". With KILL_AFTER, the process is
killed after it has been given so many batches and one more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.frameworks.accelerate import attach
from tests.support.latents import latent_loader


def train(
    url: str,
    folder: Path,
    steps: int,
    kind: str = "files",
    *,
    kill_after: int | None = None,
    transform: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Train, and return the weights at the end."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    with contextlib.ExitStack() as stack:
        if kind == "repository":
            checkpointer = Checkpointer(str(folder / "repository"), run="exp", sidecar=None)
            attach(accelerator, stack.enter_context(checkpointer))
        made = latent_loader(url, 4 // accelerator.num_processes, device=accelerator.device, transform=transform)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        model, optimizer, loader = accelerator.prepare(net, optimizer, stack.enter_context(made))
        accelerator.register_for_checkpointing(loader)
        saved = sorted(int(path.name[5:]) for path in folder.glob("step_*"))
        if saved:
            accelerator.load_state(str(folder / f"step_{saved[-1]}"))
        given, step = 0, saved[-1] if saved else 0
        while step < steps:
            for batch in loader:
                if given == kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                given, step = given + 1, step + 1
                with (folder / f"seen-{accelerator.process_index}").open("a") as file:
                    file.write(json.dumps(batch["key"]) + "\n")
                accelerator.backward(model(batch["latent"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if step % 2 == 0:
                    accelerator.save_state(str(folder / f"step_{step}"))
                if step == steps:
                    break
    return {"weights": net.weight.tolist()}


def main(url: str, folder: str, steps: str, kind: str, *kill_after: str) -> None:
    warnings.simplefilter("ignore")
    after = int(kill_after[0]) if kill_after else None
    print(json.dumps(train(url, Path(folder), int(steps), kind, kill_after=after)))
