"""Two ranks that save with a tracker: `tracker_ranks FOLDER`. Each prints what its tracker was given."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.trackers.events import CommittedStep, Tracker
from tests.support.ranks import in_group


class Recording(Tracker):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bytes_state: list[int] = []

    def start(self) -> None:
        self.calls.append("start")

    def committed(self, step: CommittedStep) -> None:
        self.calls.append(f"committed {step.step} {step.metadata}")
        self.bytes_state.append(step.bytes_state)

    def close(self) -> None:
        self.calls.append("close")


@in_group
def main(folder: str) -> None:
    tracker = Recording()
    with Checkpointer(folder, run="exp", sidecar=None, trackers=[tracker]) as checkpointer:
        own = torch.full((100,), float(dist.get_rank()))
        checkpointer.save(1, {"own": own}, metadata={"rank": dist.get_rank()}).result(60)
    print(json.dumps({"calls": tracker.calls, "bytes_state": tracker.bytes_state}), flush=True)
