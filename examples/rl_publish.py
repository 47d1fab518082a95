"""Train a policy by policy gradients. Two processes play with the published weights, and follow every version.

    python examples/rl_publish.py s3://bucket/runs

The trainer saves a step, and publishes it as bfloat16. The players fetch what changed, and apply it all at once. After
half of the updates, a mistake spoils the policy. The trainer sees it in the rewards, goes back to the best step, and
publishes that step again: a rollback.
`python examples/serve_published.py s3://bucket/runs` serves the same weights.
"""

from __future__ import annotations

import argparse

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributions import Categorical

from headrace import Checkpointer
from headrace.checkpoint import Subscriber

OBSERVATIONS, ACTIONS = 16, 8


class Policy(nn.Module):
    """Gives the scores of 8 actions for an observation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(OBSERVATIONS, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, ACTIONS)
        )

    def forward(self, observations: Tensor) -> Categorical:
        return Categorical(logits=self.layers(observations).float())


def play(url: str, games: mp.Queue, number: int) -> None:
    """Play with the newest published weights, in a process of its own."""
    torch.manual_seed(number)
    torch.set_num_threads(1)
    policy = Policy().bfloat16().requires_grad_(False)
    with Subscriber(url, "policy", poll=0.05) as subscriber:
        while True:
            version = subscriber.newest()
            if version is not None:
                version.apply(policy.state_dict())
                print(f"player {number} has version {version.number}, step {version.step}", flush=True)
            elif subscriber.version is not None:
                observations = torch.randint(OBSERVATIONS, (256,))
                actions = policy(observations).sample()
                games.put((subscriber.version, observations.tolist(), actions.tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--updates", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    state = {"model": policy, "optimizer": optimizer}
    processes = mp.get_context("spawn")
    games = processes.Queue(maxsize=4)
    for number in (1, 2):
        processes.Process(target=play, args=(args.runs, games, number), daemon=True).start()
    with Checkpointer(args.runs, run="rl") as checkpointer:
        step, best, spoiled = 0, (0.0, 0), False
        for update in range(args.updates):
            if spoiled:
                step = checkpointer.restore(state, step=best[1])
                number = checkpointer.publish("policy", step, dtype="bfloat16").result().number
                print(f"rollback to step {step}: version {number}", flush=True)
            else:
                handle = checkpointer.save(step, state)
                number = checkpointer.publish("policy", handle, dtype="bfloat16").result().number
            while True:  # games of earlier versions are thrown away
                version, *played = games.get(timeout=120)
                if version == number:
                    break
            observations, actions = map(torch.tensor, played)
            rewards = (actions == (3 * observations + 1) % ACTIONS).float()
            score = rewards.mean().item()
            print(f"update {update} version {number} step {step} reward {score:.3f}", flush=True)
            best, spoiled = max(best, (score, step)), score < best[0] - 0.3
            for _ in range(4):
                loss = -(policy(observations).log_prob(actions) * (rewards - score)).mean()
                optimizer.zero_grad(), loss.backward(), optimizer.step()
            if update == args.updates // 2:  # a mistake
                nn.init.normal_(policy.layers[-1].weight)
            step += 4


if __name__ == "__main__":
    main()
