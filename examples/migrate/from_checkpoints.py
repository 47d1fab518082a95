"""Import the checkpoints of a folder as the steps of a run, and compare all tensors.

    python examples/migrate/from_checkpoints.py out/checkpoints s3://bucket/checkpoints --run exp42

Each file or folder whose name ends in a number is a step: `step_1000.pt`, `model-1000.safetensors`, `checkpoint-1000/`,
or a folder `step-1000/` of torch.distributed.checkpoint. They are imported in order, and chunks that did not change are
stored once. Steps that the run has are left out, so the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from headrace import read
from headrace.checkpoint import import_checkpoint
from headrace.dataio.core.errors import NotFoundError

SUFFIXES = {".pt", ".pth", ".bin", ".safetensors"}


def steps_of(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by their step, oldest first."""
    found = dict[int, Path]()
    for path in folder.iterdir():
        number = re.search(r"(\d+)$", path.stem if path.suffix in SUFFIXES else path.name)
        if not number or not (path.is_dir() or path.suffix in SUFFIXES):
            continue
        if (other := found.setdefault(int(number[1]), path)) != path:
            sys.exit(f"{path.name} and {other.name} are the same step: move one of them to another folder")
    return dict(sorted(found.items()))


def newest_step(url: str, run: str) -> int:
    """The newest step of the run; -1 if it has none."""
    try:
        with read(url, run=run) as saved:
            return saved.step
    except NotFoundError:
        return -1


def tensors_of(node: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested state, with their paths."""
    if isinstance(node, torch.Tensor):
        yield path, node
    elif isinstance(node, dict | list | tuple):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from tensors_of(value, f"{path}/{key}" if path else str(key))


def source_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, as torch and safetensors read them."""
    if (path / ".metadata").exists():
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            dcp_to_torch_save(path, file.name)
            yield from source_tensors(Path(file.name))
        return
    for file in sorted(each for each in path.iterdir() if each.suffix in SUFFIXES) if path.is_dir() else [path]:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
        else:
            yield from tensors_of(torch.load(file, mmap=True, map_location="cpu", weights_only=True))


def compare(path: Path, url: str, run: str, step: int) -> bool:
    """Compare every tensor of a checkpoint with the imported step, bit by bit."""
    number = total = 0
    with read(url, run=run, step=step) as saved:
        for name, tensor in source_tensors(path):
            entry = name if name in saved else f"model/{name}"
            if entry not in saved or not same(saved[entry].read(), tensor):
                print(f"{path.name}: {name} {'differs' if entry in saved else 'is missing'}", file=sys.stderr)
                return False
            number, total = number + 1, total + tensor.nbytes
    print(f"step {step}: {number} tensors with {total} bytes are equal")
    return True


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether dtype, shape and all bits are equal."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with the checkpoints")
    parser.add_argument("repository", help="where they are stored")
    parser.add_argument("--run", required=True, help="the name of the run")
    args = parser.parse_args()
    newest = newest_step(args.repository, args.run)
    for step, path in steps_of(args.folder).items():
        if step > newest:
            report = import_checkpoint(path, args.repository, run=args.run, step=step)
            print(
                f"step {step}: {path.name}, {report.format}, {report.bytes_written} of {report.bytes_state} bytes new"
            )
            if not compare(path, args.repository, args.run, step):
                sys.exit(1)


if __name__ == "__main__":
    main()
