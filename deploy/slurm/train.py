"""An example trainer for train.sbatch and torchrun.sh: SIGUSR1 -> save -> exit code 99 (98: not saved) -> requeue -> restore."""

import os
import sys
import time

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")  # "nccl" with GPUs
STEPS = int(os.environ.get("STEPS", "1000"))
model = torch.nn.Linear(16, 1)
optim = torch.optim.AdamW(model.parameters())
trained = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
state = {"model": model, "optim": optim}

with Checkpointer(os.environ["CHECKPOINTS"], run=os.environ.get("RUN", "example")) as checkpointer:
    guard = checkpointer.on_preemption(lambda: state, deadline=100)  # srun sends the signal 120 s before the end
    first = checkpointer.restore(state) or 0
    print(f"from step {first}", flush=True)
    for step in range(first + 1, STEPS + 1):
        loss = trained(torch.randn(8, 16)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if step % 100 == 0 or step == STEPS:
            checkpointer.save(step, state)
        if guard.reached(step):
            print(f"saved step {step} and stop" if guard.outcome.committed else "not saved", flush=True)
            sys.exit(guard.exit_code)
print("done", flush=True)
