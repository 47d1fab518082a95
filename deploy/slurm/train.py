"""An example trainer for train.sbatch: SIGUSR1 -> save -> exit code 99 -> requeue -> restore."""

import os
import signal
import time

import torch

from checkpoint import Checkpointer

REQUEUE = 99
STEPS = int(os.environ.get("STEPS", "1000"))
asked = False


def ask_to_stop(*_: object) -> None:
    """Only remembers: the loop saves between two steps, where the state is whole."""
    global asked
    asked = True


signal.signal(signal.SIGUSR1, ask_to_stop)
model = torch.nn.Linear(16, 1)
optim = torch.optim.AdamW(model.parameters())
state = {"model": model, "optim": optim}

with Checkpointer(os.environ["CHECKPOINTS"], run=os.environ.get("RUN", "example")) as checkpointer:
    first = checkpointer.restore(state) or 0
    print(f"from step {first}", flush=True)
    for step in range(first + 1, STEPS + 1):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if asked or step % 100 == 0 or step == STEPS:
            handle = checkpointer.save(step, state)
        if asked:
            handle.result(100)
            print(f"saved step {step} and stop", flush=True)
            raise SystemExit(REQUEUE)
print("done", flush=True)
