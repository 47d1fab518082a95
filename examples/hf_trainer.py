"""Train an image classifier with the Trainer of transformers, on a Headrace loader, with checkpoints in a repository.

    headrace index s3://bucket/pictures s3://bucket/dataset
    python examples/hf_trainer.py s3://bucket/dataset s3://bucket/runs --output out

A picture `7.png` has its class in `7.json`: `{"label": 1}`. A restart continues at the exact batch, and reads nothing of
what came before. `out/checkpoint-20` holds only the name of a step. The weights are in the repository.
"""

import argparse

from transformers import TrainingArguments, ViTConfig, ViTForImageClassification, set_seed
from transformers.trainer_utils import get_last_checkpoint

from headrace import Checkpointer
from headrace.checkpoint.frameworks.transformers import RepositoryTrainer
from headrace.loaders import Image, Json, Loader

FIELDS = {
    "pixel_values": Image(size=(32, 32), dtype="float32", normalize=((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))),
    "labels": Json("label", dtype="int64"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the indexed pictures")
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--output", default="out", help="the Trainer's folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    set_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    arguments = TrainingArguments(
        args.output,
        max_steps=args.steps,
        save_steps=args.save_every,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
    )
    with (
        Loader(args.dataset, batch_size=4, fields=FIELDS, trust_mounts=True) as loader,
        Checkpointer(args.runs, run="classifier") as checkpointer,
    ):
        model = ViTForImageClassification(config)
        trainer = RepositoryTrainer(model, arguments, train_dataset=loader, checkpointer=checkpointer)
        last = get_last_checkpoint(args.output)
        trainer.train(resume_from_checkpoint=last)
        print(f"trained to step {trainer.state.global_step}, from {last}", flush=True)


if __name__ == "__main__":
    main()
