"""A trainer that uses public names, so that it also runs with the code of an earlier release.

    python -P upgrade_trainer.py SOCKET DATASET REPOSITORY

It restores, then obeys the lines of its standard input: `step` reads a batch and saves, `stage` saves without waiting for the
commit, `end` ends. It answers each with a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from headrace import AudioLoader, Checkpointer
from headrace.dataio.sidecar import client


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main(socket: str, dataset: str, repository: str) -> None:
    # the dataset is a folder, which is to be read through the daemon
    client.may_have_local_files = lambda store: False  # type: ignore[attr-defined]
    loader = AudioLoader(dataset, batch_size=1, window=0.1, shuffle=False, sidecar=socket)
    checkpointer = Checkpointer(repository, run="exp", sidecar=socket)
    weight = torch.zeros(100_000)
    state = {"w": weight, "loader": loader}
    step = checkpointer.restore(state) or 0
    say(restored=step)
    batches = iter(loader)
    for line in sys.stdin:
        if line == "end\n":
            break
        batch = next(batches)
        step += 1
        weight += 1
        handle = checkpointer.save(step, state)
        if line == "stage\n":
            handle.staged(60)
            say(step=step)
            continue
        digest = hashlib.sha256(batch["audio"].numpy().tobytes()).hexdigest()
        say(step=step, committed_by=handle.result(60).committed_by, audio=digest)
    checkpointer.close()
    loader.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
