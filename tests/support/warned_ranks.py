"""Two ranks of one node that meet the same problems: `warned_ranks FOLDER`. Each prints the warnings that it logged.

`FOLDER` has the dataset "clips" and a repository with the run "other". No daemon answers.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist

from headrace import Checkpointer, Clip, VideoLoader
from headrace.dataio.core.log import get_logger, warn_once
from tests.support.ranks import in_group


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@in_group
def main(where: str) -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    folder, rank, warned = Path(where), dist.get_rank(), Warnings()
    logging.getLogger("headrace").addHandler(warned)
    no_daemon = folder / "no.sock"
    model = torch.nn.Linear(4, 4)
    with (
        VideoLoader(folder / "clips", batch_size=2, clip=Clip(frames=2), sidecar=no_daemon) as loader,
        Checkpointer(folder / "checkpoints", run="exp", sidecar=no_daemon, timeout=60) as saver,
    ):
        state = {"model": model, "loader": loader}
        assert saver.restore(state) is None  # the run has no step, and another run exists
        old = loader.state_dict()
        saver.save(1, state).result(60)
        saver.restore({"model": model, "new": torch.ones(3)}, strict=False)
        saver.restore(state, include=["model/*", "nothing/*"])
        loader.load_state_dict({**old, "seed": 7}, force=True)
        for _ in loader:
            pass
    if rank == 1:
        warn_once(get_logger("test"), "only rank 1 notices this", "node")
    print(json.dumps({"warnings": warned.messages}), flush=True)


if __name__ == "__main__":
    main()
