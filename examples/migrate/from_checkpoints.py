"""Import the checkpoints of a folder as the steps of a run, and compare all tensors.

    python examples/migrate/from_checkpoints.py out/checkpoints s3://bucket/checkpoints --run exp42

Each file or folder whose name ends in a number is a step: `step_1000.pt`, `model-1000.safetensors`, `checkpoint-1000/`,
or a folder `step-1000/` of torch.distributed.checkpoint. They are imported in order, and chunks that did not change are
stored once. Steps that the run has are left out, so the same command continues after an interruption.

A file that can run code when it is loaded is refused. If one is refused, no step is imported, because an older step
cannot be added to a run that has newer ones. With `--skip-refused`, the other steps are imported.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from headrace import read
from headrace.checkpoint import import_checkpoint
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError, UnsupportedError, UsageError

SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}
CANNOT_BE_ADDED = "an older step cannot be added to a run that has newer ones"


def steps_of(folder: Path, pattern: str) -> dict[int, Path]:
    """The checkpoints of a folder by their step, oldest first. Prints what has no step."""
    found = dict[int, Path]()
    for path in sorted(folder.glob(pattern)):
        if not (path.is_dir() or path.suffix in SUFFIXES):
            continue
        number = re.search(r"(\d+)$", path.stem if path.suffix in SUFFIXES else path.name)
        if not number:
            print(f"{path.name} is left out: its name does not end in the number of a step")
        elif (other := found.setdefault(int(number[1]), path)) != path:
            one, two = (re.sub(r"\d+(?=\D*$)", "*", name) for name in (other.name, path.name))
            sys.exit(
                f"{other.name} and {path.name} are the same step: import each kind into a run of its own, with"
                f" --files '{one}', and with --files '{two}' and another --run"
            )
    return dict(sorted(found.items()))


def code_of(path: Path) -> list[str]:
    """The code that a file of torch.save needs, other than what torch allows. The file is not loaded."""
    if path.is_dir() or not zipfile.is_zipfile(path):
        return []
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # damaged, or another format: the import says what is wrong
        return []


def refused(steps: dict[int, Path]) -> list[int]:
    """Print a line for each file that can run code, and return their steps."""
    found = list[int]()
    for step, path in steps.items():
        if code := code_of(path):
            print(f"{path.name} is refused: it can run code when it is loaded ({', '.join(code)})", file=sys.stderr)
            found.append(step)
    return found


def has_step(url: str, run: str, step: int | str) -> int:
    """The number of this step of the run, or of its newest one ("latest"); -1 if the run does not have it."""
    try:
        with read(url, run=run, step=step) as saved:
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


def is_there(path: Path, url: str, run: str, step: int, newest: int) -> bool:
    """Whether the run has this step, which is not newer than its newest one. Prints the answer."""
    if has_step(url, run, step) == step:
        print(f"step {step}: {path.name} is already there")
        return True
    print(f"step {step}: {path.name} is left out: the run has step {newest}, and {CANNOT_BE_ADDED}", file=sys.stderr)
    return False


def import_step(path: Path, url: str, run: str, step: int) -> bool:
    """Import a checkpoint, compare it, and return whether the step has all of it."""
    try:
        report = import_checkpoint(path, url, run=run, step=step)
    except (CorruptionError, UnsupportedError, UsageError) as error:
        print(f"step {step}: {path.name} is refused: {error}", file=sys.stderr)
        return False
    print(f"step {step}: {path.name}, {report.format}, {report.bytes_written} of {report.bytes_state} bytes new")
    return compare(path, url, run, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with the checkpoints")
    parser.add_argument("repository", help="where they are stored")
    parser.add_argument("--run", required=True, help="the name of the run")
    parser.add_argument("--files", default="*", metavar="PATTERN", help="import these only, such as 'step_*'")
    parser.add_argument("--skip-refused", action="store_true", help="import the other steps if some are refused")
    args = parser.parse_args()
    if not (steps := steps_of(args.folder, args.files)):
        sys.exit(f"{args.folder} has no file or folder {args.files} whose name ends in the number of a step")
    unsafe = refused(steps)
    if unsafe and not args.skip_refused:
        sys.exit(f"nothing was imported: convert these files, or leave them out with --skip-refused; {CANNOT_BE_ADDED}")
    complete, newest = not unsafe, has_step(args.repository, args.run, "latest")
    for step, path in steps.items():
        if step in unsafe:
            continue
        if step <= newest:
            complete &= is_there(path, args.repository, args.run, step, newest)
        elif not import_step(path, args.repository, args.run, step):
            complete = False
            if not args.skip_refused:
                break
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    try:
        main()
    except HeadraceError as error:
        sys.exit(str(error))
