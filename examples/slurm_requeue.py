"""A training that Slurm may preempt or end at its time limit: it saves, is requeued, and continues with the next batch.

    headrace index s3://bucket/pictures s3://bucket/dataset
    sbatch examples/slurm_requeue.sbatch s3://bucket/dataset s3://bucket/runs

SIGUSR1 and SIGTERM request a save. After the step that is being trained, all ranks save it and end with exit code 99: the
step is committed. Exit code 98: it is not committed yet. The job script requeues the job on both codes. A picture `7.png`
has its class in `7.json`: `{"label": 1}`.
"""

import argparse
import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn

from headrace import RNG, Checkpointer
from headrace.loaders import Image, Json, Loader

FIELDS = {"image": Image(size=(32, 32), dtype="float32"), "label": Json("label", dtype="int64")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the indexed pictures")
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")  # with GPUs: "nccl", and device="cuda" for the loader
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))
    trained = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        Loader(args.dataset, 4, fields=FIELDS, seed=1, trust_mounts=True) as loader,
        Checkpointer(args.runs, run="requeued") as checkpointer,
    ):
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNG()}
        guard = checkpointer.on_preemption(lambda: state, deadline=100)  # Slurm signals 120 s before the end
        first = checkpointer.restore(state) or 0
        print(f"from step {first}", flush=True)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        for step, batch in zip(range(first + 1, args.steps + 1), batches, strict=False):
            loss = nn.functional.cross_entropy(trained(batch["image"] / 255), batch["label"])
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            print(f"step {step} loss {loss:.6f} keys {' '.join(batch['key'])}", flush=True)
            if step % args.save_every == 0 or step == args.steps:
                checkpointer.save(step, state)
            if guard.reached(step):  # between two steps: saves, and waits for the commit
                sys.exit(guard.exit_code)


if __name__ == "__main__":
    main()
