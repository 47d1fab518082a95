"""Fine-tune a Llama of torchtitan: from a Hugging Face folder, through a repository, to a Hugging Face folder.

    headrace index 's3://bucket/tokens/*.tar' s3://bucket/dataset
    headrace ckpt import llama-hf s3://bucket/runs --run tuned --step 0
    torchrun --standalone --nproc-per-node 2 examples/torchtitan_finetune.py s3://bucket/dataset s3://bucket/runs

A sample `7.npy` is a row of token ids, int64 (L,). Step 0 has the imported weights. A restart continues after the newest
step, with the next batch. The last step is written to `out/checkpoint/step-100`, for `from_pretrained`. The model,
optimizer, schedule and checkpoint manager are torchtitan's, which needs Triton (`pip install triton` with torch for CPUs).
"""

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from headrace.checkpoint.frameworks.torchtitan import RepositoryCheckpointManager
from headrace.loaders import Loader, Npy


class TrainState:
    """The part of the state that is torchtitan's Trainer itself."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def build_model(config: nn.Module, layers: int, length: int) -> nn.Module:
    """Build the first `layers` of a Llama, for rows of `length` tokens. Each block is a unit of FSDP2."""
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.rope.max_seq_len = length
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention trains on GPUs only
    model = config.build()
    model.init_states()
    for block in model.layers.values():
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the indexed rows of tokens")
    parser.add_argument("runs", help="the repository with step 0 of the run `tuned`")
    parser.add_argument("--output", default="out", help="where the Hugging Face folder is written")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")  # with GPUs: "nccl", and device="cuda" for the loader
    torch.manual_seed(0)
    spec, trained = model_registry("debugmodel"), TrainState()
    model = build_model(spec.model, args.layers, length=512)
    optimizers = default_adamw(lr=3e-4).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=5).build(optimizers=optimizers, training_steps=args.steps)
    config = RepositoryCheckpointManager.Config(
        enable=True, url=args.runs, run="tuned", interval=args.save_every, last_save_in_hf=True
    )
    with Loader(args.dataset, 4, fields={"tokens": Npy("npy")}, seed=1, trust_mounts=True) as loader:
        manager = config.build(
            dataloader=loader,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedule,
            states={"train_state": trained},
            sd_adapter=spec.state_dict_adapter(spec.model, None),
            base_folder=args.output,
        )
        manager.load()
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):  # epoch after epoch
            if trained.step == args.steps:
                break
            scores = model(batch["tokens"][:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch["tokens"][:, 1:].flatten())
            optimizers.zero_grad(), loss.backward(), optimizers.step(), schedule.step()
            trained.step += 1
            if dist.get_rank() == 0:
                print(f"step {trained.step} loss {loss:.6f} keys {' '.join(batch['key'])}", flush=True)
            manager.save(trained.step, last_step=trained.step == args.steps)
        manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
