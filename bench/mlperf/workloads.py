"""The published numbers: what an accelerator eats, and what a checkpoint of a model is.

Training: github.com/mlcommons/storage, `configs/dlio/workload/<model>_<accelerator>.yaml` (record length, batch size,
computation time of a batch, minimum accelerator utilisation); the a100 files are those of DLIO 2.0. Checkpoints: the same
repository's Submission_guidelines.md, version 2.0, table 2 (sizes, processes); "105 GB" and "5.29 TB" there are 105 and
5,290 GiB: 14 bytes for each of 8.03 and 405.9 billion parameters (fp16 weights; fp32 master weights and two moments), so
a size is split 2 : 4 : 4 : 4. `video` is our own and published by nobody.
Invariant: pure. `scaled` shrinks records and computation alike, so the bytes a second that an accelerator asks for stay
the same. Failure behaviour: an unknown name is a `UsageError`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB


@dataclass(frozen=True)
class Workload:
    """Bytes of a record (mean and spread), records of a batch, seconds that the accelerator computes on it, least AU."""

    name: str
    record_bytes: float
    record_stdev: float
    batch: int
    compute_seconds: float
    least_au: float

    @property
    def rate(self) -> float:
        """Bytes a second that one accelerator needs to be busy all the time."""
        return self.record_bytes * self.batch / self.compute_seconds

    def scaled(self, fraction: float) -> Workload:
        """Records and computation times `fraction`."""
        if not 0 < fraction <= 1:
            raise UsageError("--fraction is above 0 and at most 1")
        return replace(
            self,
            record_bytes=self.record_bytes * fraction,
            record_stdev=self.record_stdev * fraction,
            compute_seconds=self.compute_seconds * fraction,
        )


WORKLOADS = {
    ("unet3d", "h100"): Workload("unet3d", 146_600_628, 68_341_808, 7, 0.323, 0.90),
    ("unet3d", "a100"): Workload("unet3d", 146_600_628, 68_341_808, 7, 0.636, 0.90),
    ("resnet50", "h100"): Workload("resnet50", 114_660.07, 0, 400, 0.224, 0.90),
    ("resnet50", "a100"): Workload("resnet50", 114_660.07, 0, 400, 0.435, 0.90),
    ("cosmoflow", "h100"): Workload("cosmoflow", 2_828_486, 71_311, 1, 0.00350, 0.70),
    ("cosmoflow", "a100"): Workload("cosmoflow", 2_828_486, 71_311, 1, 0.00551, 0.70),
    ("video", "h100"): Workload("video", 60_000, 0, 8, 0.8, 0.90),
}


@dataclass(frozen=True)
class Model:
    """Bytes of a whole checkpoint, processes that write it by the rules, layers."""

    name: str
    checkpoint_bytes: float
    processes: int
    layers: int


MODELS = {
    "8b": Model("8b", 105 * GIB, 8, 32),
    "70b": Model("70b", 912 * GIB, 64, 80),
    "405b": Model("405b", 5290 * GIB, 512, 126),
    "1t": Model("1t", 18_000 * GIB, 1024, 128),
}
SHARES = {"model": 2 / 14, "master": 4 / 14, "moment_1": 4 / 14, "moment_2": 4 / 14}


def workload(name: str, accelerator: str) -> Workload:
    """The numbers of a workload on an accelerator."""
    try:
        return WORKLOADS[name, accelerator]
    except KeyError:
        known = ", ".join(f"{one} on {other}" for one, other in WORKLOADS)
        raise UsageError(f"no workload {name!r} on {accelerator!r}", hint=f"there are {known}") from None


def model(name: str) -> Model:
    """The numbers of a model."""
    if name not in MODELS:
        raise UsageError(f"no model {name!r}", hint=f"there are {', '.join(MODELS)}")
    return MODELS[name]


def utilisation(compute_seconds: float, steps: int, wall: float) -> float:
    """AU of the rules: computing time over the running time of the benchmark, for one accelerator; 0 to 1."""
    return compute_seconds * steps / wall if wall > 0 else 0.0
