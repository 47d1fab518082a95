"""Ranks of which one has drifted: `replicas_job.py DIRECTORY`. Each prints what a save says of its replicas."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from headrace.dataio.core import metrics
from headrace.dataio.core.errors import HeadraceError
from tests.support.ranks import in_group


class Lines(logging.Handler):
    """Warnings of the checkpointer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3))
    made.get_buffer("1.running_mean").fill_(dist.get_rank())  # each rank's own, under DistributedDataParallel
    return made


def save(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"diverged": checkpointer.save(step, state).result(60).diverged}
    except HeadraceError as error:
        return {"error": type(error).__name__, "message": str(error)}


@in_group
def main(directory: str) -> None:
    lines = Lines()
    logging.getLogger("headrace").addHandler(lines)
    saved = {"model": model()}
    found: dict[str, Any] = {}
    with Checkpointer(directory, run="warn", sidecar=None, timeout=60, check_replicas="warn") as checkpointer:
        found["same"] = save(checkpointer, 1, saved)
        if dist.get_rank() == 1:
            with torch.no_grad():
                saved["model"].get_parameter("0.weight").mul_(1.001)
        found["differ"] = save(checkpointer, 2, saved)
    found["lines"] = [line for line in lines.lines if "differ" in line]
    found["counted"] = metrics.checkpoint_replicas_diverged._value.get()
    with Checkpointer(directory, run="error", sidecar=None, timeout=60) as checkpointer:
        found["refused"] = save(checkpointer, 1, saved)
        found["steps"] = checkpointer.steps()
    with Checkpointer(directory, run="off", sidecar=None, timeout=60, check_replicas="off") as checkpointer:
        found["trusted"] = save(checkpointer, 1, saved)
    found["stages"] = stages(directory)
    print(json.dumps(found), flush=True)


def stages(directory: str) -> dict[str, Any]:
    """Modules with equal names and shapes whose content is each rank's own; ranks 1 and 2 hold the same one."""
    torch.manual_seed(min(dist.get_rank(), 1))
    stage, made = min(dist.get_rank(), 1), torch.nn.Linear(40, 40)
    before = made.weight.clone()
    with Checkpointer(directory, run="stages", sidecar=None, timeout=60) as checkpointer:
        refused = save(checkpointer, 1, {"model": made})
        written = checkpointer.save(2, {f"stage{stage}": made}).result(60).bytes_state
        with torch.no_grad():
            made.weight.zero_()
        checkpointer.restore({f"stage{stage}": made})
    return {**refused, "same": torch.equal(before, made.weight), "bytes": written}
