"""`headrace bench exchange`: exports, imports and copies of a step, each compared with another tool for the same bytes.

- Exports: a safetensors file, compared with `safetensors.torch.save_file` of tensors in memory, and a torch file, compared
  with `dcp_to_torch_save`, which also reads a checkpoint and writes a file.
- Import: a safetensors file becomes a step. The peer loads the file and saves it by `torch.distributed.checkpoint`.
- Copy: a step goes to another folder, and into a bucket of an S3 server on this machine. The peers are `rclone copy` and
  `s5cmd cp` of the same objects. A program that is not installed is left out.

Ours read verified bytes and end when their files are synced to the disk. The time of a peer ends in the same way: after
it has returned, its files are synced. *Returned* is the time before that. The server of a bucket syncs nothing.

Invariant: every candidate runs in its own process, and its output is deleted before the next one. At most four times the
bytes of the step are on the disk.
Failure behaviour: a candidate that fails is named, and the others continue.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, Meter, alternate, command_of, run_process
from headrace.bench.core.processes import environment_variables
from headrace.bench.core.results import Metric, Part
from headrace.bench.workloads.loader import installed
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.limits import MIB
from headrace.dataio.testing.s3_server import start_seaweedfs

TENSORS = 16
STEP, WHOLE_FILE, FOLDER = "repository", "weights.safetensors", "dcp"
EXPORT, SAVE_FILE = "export to safetensors", "safetensors.torch.save_file"
EXPORT_TORCH, DCP_TO_TORCH = "export to torch", "dcp_to_torch_save"
IMPORT, TO_DCP = "import of safetensors", "load_file and dcp.save"
COPY, RCLONE = "copy", "rclone copy"
UPLOAD, RCLONE_UPLOAD, S5CMD_UPLOAD = "copy to S3", "rclone copy to S3", "s5cmd cp to S3"
PAIRS = (
    (EXPORT, SAVE_FILE),
    (EXPORT_TORCH, DCP_TO_TORCH),
    (IMPORT, TO_DCP),
    (COPY, RCLONE),
    (UPLOAD, RCLONE_UPLOAD),
    (UPLOAD, S5CMD_UPLOAD),
)
NAMES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))
PROGRAMS = {RCLONE: "rclone", RCLONE_UPLOAD: "rclone", S5CMD_UPLOAD: "s5cmd"}
METRICS = {
    "wall_s": Metric("s", "s", "lower"),
    "returned_s": Metric("returned s", "s", "lower"),
    "mb_per_s": Metric("MB/s", "MB/s", "higher"),
    "cpu_s": Metric("CPU s", "s", "lower"),
    "peak_mib": Metric("peak MiB", "MiB", "lower"),
}


@benchmark(
    "exchange",
    "Exports, imports and copies of a step, compared with other tools for the same bytes.",
    argument("--mib", type=positive_int, default=1024, help="MiB of bf16 tensors (default: %(default)s)"),
    argument("--only", nargs="+", choices=NAMES, help="these candidates", metavar="NAME"),
)
def exchange(job: Job, part: Part) -> None:
    """Make the inputs, and measure all candidates in turn."""
    mib, scratch = job.args.mib, job.scratch
    part.title = f"{mib} MiB of bf16 tensors, in {TENSORS} tensors"
    part.settings = {"mib": mib, "tensors": TENSORS}
    part.metrics = METRICS
    job.progress("making the inputs", 0.0)
    made = run_process(command_of("headrace.bench.workloads.exchange:make", str(scratch), mib), os.environ, 300)
    if made.returncode:  # in a process of its own: candidates would inherit its peak memory
        raise RuntimeError(f"the inputs were not made: {made.stderr[-500:]}")
    candidates = [
        Candidate(name, "headrace.bench.workloads.exchange:measure", (name, str(scratch)))
        for name in job.args.only or NAMES
        if is_installed(name)
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)
    _note_ratios(part)


def is_installed(name: str) -> bool:
    """Whether a candidate's package or program is installed."""
    if name in (SAVE_FILE, TO_DCP):
        return installed("safetensors")
    return name not in PROGRAMS or shutil.which(PROGRAMS[name]) is not None


def _note_ratios(part: Part) -> None:
    for ours, peer in PAIRS:
        samples = [part.candidates[name].metrics.get("wall_s") for name in (ours, peer) if name in part.candidates]
        if len(samples) == 2 and samples[0] and samples[1]:
            part.notes.append(f"{ours} takes {median(samples[0]) / median(samples[1]):.2f} of the time of {peer}.")


def _tensors(mib: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    rows = mib * MIB // TENSORS // 2 // 1024
    return {f"layer_{n}.weight": torch.randn(rows, 1024).bfloat16() for n in range(TENSORS)}


def make(folder: str, mib: int) -> dict[str, float]:
    """Write the same tensors as a step, and, if the peers are installed, as a safetensors file and by DCP."""
    from headrace.checkpoint import Checkpointer

    scratch, tensors = Path(folder), _tensors(mib)
    with Checkpointer(scratch / STEP, run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, {"model": tensors}).result()
    if installed("safetensors"):
        from safetensors.torch import save_file

        save_file(tensors, scratch / WHOLE_FILE)
    _dcp_save(tensors, scratch / FOLDER)
    return {}


def measure(name: str, folder: str) -> dict[str, float]:
    """Measure one candidate, and delete its output."""
    scratch = Path(folder)
    target = scratch / "output"
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, target)
        work = _PREPARED[name](scratch, target, stack)
        meter, began = Meter(), time.perf_counter()
        work()
        returned = time.perf_counter() - began
        _sync(target)
        figures = meter.read()
        nbytes = _size(target if target.exists() else scratch / STEP)
    return figures | {"returned_s": returned, "mb_per_s": nbytes / 1e6 / figures["wall_s"]}


def _remove(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)


def _size(target: Path) -> int:
    return sum(path.stat().st_size for path in _files(target))


def _files(target: Path) -> list[Path]:
    if target.is_dir():
        return [path for path in target.rglob("*") if path.is_file()]
    return [target] if target.exists() else []


def _sync(target: Path) -> None:
    for path in _files(target):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


_Prepare = Callable[[Path, Path, contextlib.ExitStack], Callable[[], object]]


def _export(format: str) -> _Prepare:
    def prepare(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
        from headrace.checkpoint import export

        return lambda: export(scratch / STEP, target, run="r", format=format)

    return prepare


def _save_file(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    from safetensors.torch import load_file, save_file

    tensors = {name: value.clone() for name, value in load_file(scratch / WHOLE_FILE).items()}
    return lambda: save_file(tensors, target)


def _dcp_to_torch(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    return lambda: dcp_to_torch_save(scratch / FOLDER, target)


def _import(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    from headrace.checkpoint import import_checkpoint

    return lambda: import_checkpoint(scratch / WHOLE_FILE, target, run="r")


def _to_dcp(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    from safetensors.torch import load_file

    return lambda: _dcp_save(load_file(scratch / WHOLE_FILE), target)


def _dcp_save(tensors: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only one process
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)


def _copy(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    from headrace.checkpoint import copy

    return lambda: copy(scratch / STEP, target, run="r")


def _rclone(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    return _program("rclone", "copy", "--config", os.devnull, str(scratch / STEP), str(target))


def _bucket(stack: contextlib.ExitStack) -> str:
    """Start an S3 server, point this process to it, and return the URL of an empty bucket."""
    server = stack.enter_context(start_seaweedfs())
    rclone = {"RCLONE_S3_PROVIDER": "Other", "RCLONE_S3_ENV_AUTH": "true", "RCLONE_S3_NO_CHECK_BUCKET": "true"}
    endpoints = {"RCLONE_S3_ENDPOINT": server.endpoint, "S3_ENDPOINT_URL": server.endpoint}
    stack.enter_context(environment_variables(server.environment() | rclone | endpoints))
    os.environ.pop("AWS_CA_BUNDLE", None)  # rclone refuses it, and the server speaks plain HTTP
    return server.create_bucket("copies")


def _upload(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    from headrace.checkpoint import copy

    url = _bucket(stack)
    return lambda: copy(scratch / STEP, f"{url}/{STEP}", run="r")


def _rclone_upload(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    place = _bucket(stack).removeprefix("s3://")
    return _program("rclone", "copy", "--config", os.devnull, str(scratch / STEP), f":s3:{place}/{STEP}")


def _s5cmd_upload(scratch: Path, target: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    url = _bucket(stack)
    return _program("s5cmd", "cp", f"{scratch / STEP}/", f"{url}/{STEP}/")


def _program(*command: str) -> Callable[[], object]:
    def run() -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")

    return run


_PREPARED: dict[str, _Prepare] = {
    EXPORT: _export("safetensors"),
    SAVE_FILE: _save_file,
    EXPORT_TORCH: _export("torch"),
    DCP_TO_TORCH: _dcp_to_torch,
    IMPORT: _import,
    TO_DCP: _to_dcp,
    COPY: _copy,
    RCLONE: _rclone,
    UPLOAD: _upload,
    RCLONE_UPLOAD: _rclone_upload,
    S5CMD_UPLOAD: _s5cmd_upload,
}
