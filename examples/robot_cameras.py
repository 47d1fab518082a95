"""Train a policy on a LeRobot data set where it lies: two cameras at the same instants, states, and chunks of actions.

    headrace index s3://bucket/so101 s3://bucket/dataset
    python examples/robot_cameras.py s3://bucket/dataset s3://bucket/runs

Each episode is a sample. A clip of the front camera is drawn. The wrist camera shows the same instants, and `state` has
the rows of the table at them. `action` has the rows after the last frame; beyond the end of the episode, `action.pad` is
true. A restart continues with the next batch.
"""

import argparse
import itertools

import torch
from torch import Tensor, nn

from headrace import Checkpointer, Clip
from headrace.loaders import Loader, Rows, Video

FRAMES, CHUNK, FPS, JOINTS = 2, 4, 30, 6
FIELDS = {
    "front": Video(Clip(FRAMES, fps=10), file="front.mp4", size=(64, 64)),
    "wrist": Video(file="wrist.mp4", like="front", size=(64, 64)),
    "state": Rows("rows.safetensors", "observation.state", like="front"),
    "action": Rows("rows.safetensors", "action", like="front", offsets=[n / FPS for n in range(1, CHUNK + 1)]),
}


class Policy(nn.Module):
    """Predicts the next actions from both cameras and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 32))
        self.act = nn.Sequential(nn.Linear(FRAMES * (2 * 32 + JOINTS), 64), nn.ReLU(), nn.Linear(64, CHUNK * JOINTS))

    def forward(self, front: Tensor, wrist: Tensor, state: Tensor) -> Tensor:
        seen = [self.see(video.flatten(0, 1) / 255).unflatten(0, (len(state), FRAMES)) for video in (front, wrist)]
        return self.act(torch.cat([*seen, state.float()], dim=-1).flatten(1)).unflatten(1, (CHUNK, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the indexed episodes")
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    with (
        Loader(args.dataset, batch_size=2, fields=FIELDS, seed=1, trust_mounts=True) as loader,
        Checkpointer(args.runs, run="policy") as checkpointer,
    ):
        policy = Policy()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        state = {"policy": policy, "optimizer": optimizer, "loader": loader}
        first = checkpointer.restore(state) or 0
        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        for step, batch in zip(range(first + 1, args.steps + 1), batches, strict=False):
            predicted = policy(batch["front"], batch["wrist"], batch["state"])
            errors = (predicted - batch["action"]).square().mean(dim=-1)
            loss = errors[~batch["action.pad"]].mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            print(f"step {step} loss {loss:.5f} keys {' '.join(batch['key'])}", flush=True)
            if step % args.save_every == 0 or step == args.steps:
                checkpointer.save(step, state)


if __name__ == "__main__":
    main()
