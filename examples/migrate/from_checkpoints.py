"""Import the checkpoints of a folder as the steps of a run, and compare all tensors.

    python examples/migrate/from_checkpoints.py out/checkpoints s3://bucket/checkpoints --run exp42

Each file or folder whose name ends in a number is a step: `step_1000.pt`, `model-1000.safetensors`, `checkpoint-1000/`,
or a folder `step-1000/` of torch.distributed.checkpoint. They are imported in order, and chunks that did not change are
stored once. Steps that the run has are left out, so the same command continues after an interruption.

The script first prints which file becomes which step, and checks all files. These are refused:

- damaged files, and files that can run code when they are loaded
- names with several numbers, unless `--files` says which is the step: `--files 'step_{step}_loss*.pt'`

If one is refused, no step is imported, because an older step cannot be added to a run that has newer ones. With
`--skip-refused`, the other steps are imported. `--dry-run` ends after the checks.
"""

from __future__ import annotations

import argparse
import fnmatch
import glob
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
STEP = "{step}"
CANNOT_BE_ADDED = "an older step cannot be added to a run that has newer ones"


def regex_of(pattern: str) -> re.Pattern[str]:
    """A pattern of `--files`, in which `{step}` stands for the number of the step."""
    before, mark, after = pattern.partition(STEP)
    texts = [fnmatch.translate(text).removesuffix(r"\z").removesuffix(r"\Z") for text in (before, after)]
    return re.compile(r"(?<!\d)(?P<step>\d+)(?!\d)".join(texts) + r"\Z" if mark else texts[0] + r"\Z")


def step_of(name: str, patterns: list[str]) -> tuple[str, int]:
    """The kind of a checkpoint, which is a pattern of `--files` for its names, and its step.

    The step is the number that `{step}` of a pattern stands for. Otherwise it is the number at the end of the name.

    Raises:
        LookupError: The name has no step.
        ValueError: The name has several numbers, or one of a version such as "v2".
    """
    for match in (regex_of(pattern).match(name) for pattern in patterns if STEP in pattern):
        if match:
            before, after = (glob.escape(part) for part in (name[: match.start("step")], name[match.end("step") :]))
            return f"{before}{STEP}{after}", int(match["step"])
    stem = Path(name).stem if Path(name).suffix in SUFFIXES else name
    number = re.search(r"\d+$", stem)
    if not number:
        raise LookupError(name)
    start = stem[: number.start()]
    if re.search(r"\d", start) or re.search(r"(^|[^a-zA-Z])v$", start, re.IGNORECASE):
        raise ValueError(name)
    return f"{glob.escape(start)}*{glob.escape(name[len(stem) :])}", int(number[0])


def steps_of(folder: Path, patterns: list[str], run: str) -> tuple[dict[int, Path], list[Path]]:
    """The checkpoints of a folder by their step, oldest first, and those whose step is ambiguous.

    Prints what has no step, or matches no pattern. Ends the program if two checkpoints are of one step.
    """
    kinds, ambiguous = dict[str, dict[int, Path]](), list[Path]()
    for path in sorted(folder.iterdir()):
        if not (path.is_dir() or path.suffix in SUFFIXES):
            continue
        if not any(regex_of(pattern).match(path.name) for pattern in patterns):
            print(f"{path.name} is left out by --files")
            continue
        try:
            kind, step = step_of(path.name, patterns)
        except LookupError:
            print(f"{path.name} is left out: its name does not end in the number of a step")
        except ValueError:
            ambiguous.append(path)
        else:
            if (other := kinds.setdefault(kind, {}).setdefault(step, path)) != path:
                sys.exit(f"{other.name} and {path.name} are the same step: leave one out with --files")
    require_different_steps(kinds, run)
    return dict(sorted(item for kind in kinds.values() for item in kind.items())), ambiguous


def require_different_steps(kinds: dict[str, dict[int, Path]], run: str) -> None:
    """End the program if two kinds of checkpoints have the same step, such as `step_1000.pt` and `ema_1000.pt`.

    The message divides the kinds between two runs. The first run gets as many kinds as possible, because a later call
    cannot add older steps to it.
    """
    first, second, taken = list[str](), list[str](), dict[int, Path]()
    same = ""
    for kind in sorted(kinds, key=lambda kind: ("ema" in kind, -len(kinds[kind]), kind)):
        if common := sorted(kinds[kind].keys() & taken.keys()):
            second.append(kind)
            same = same or f"{taken[common[0]].name} and {kinds[kind][common[0]].name} are the same step"
        else:
            first.append(kind)
            taken |= kinds[kind]
    if second:
        one, two = (" ".join(f"--files '{kind}'" for kind in each) for each in (first, second))
        sys.exit(
            f"{same}: import them into two runs, with --run {run} {one}, and with --run {run}-2 {two}; {CANNOT_BE_ADDED},"
            " so a run needs all its files in one call"
        )


def code_of(path: Path) -> list[str]:
    """The code that a file of torch.save needs, other than what torch allows. The file is not loaded."""
    if path.is_dir() or not zipfile.is_zipfile(path):
        return []
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # damaged, or another format: the import says what is wrong
        return []


def problem_of(path: Path, url: str, run: str, step: int) -> str:
    """Why a checkpoint cannot be imported; "" if it can. Reads its structure, and not its tensors."""
    if code := code_of(path):
        return f"it can run code when it is loaded ({', '.join(code)})"
    try:
        import_checkpoint(path, url, run=run, step=step, dry_run=True)
    except HeadraceError as error:
        return str(error)
    return ""


def refused(steps: dict[int, Path], url: str, run: str) -> list[int]:
    """Print a line for each checkpoint that cannot be imported, and return their steps."""
    found = list[int]()
    for step, path in steps.items():
        if problem := problem_of(path, url, run, step):
            print(f"{path.name} is refused: {problem}", file=sys.stderr)
            found.append(step)
    return found


def require_known_steps(ambiguous: list[Path], skip: bool) -> None:
    """Print the checkpoints whose step is ambiguous, and end the program unless they are to be left out."""
    for path in ambiguous:
        print(f"{path.name} is refused: it is not clear which number of its name is the step", file=sys.stderr)
    if ambiguous and not skip:
        number = r"\d+(?:\.\d+)*"
        before, after = re.split(number, ambiguous[0].name, maxsplit=1)
        example = f"{before}{STEP}{re.sub(number, '*', after)}"
        sys.exit(
            f"nothing was imported: write {STEP} where the number of the step is, such as --files '{example}', or leave"
            f" these out with other --files; {CANNOT_BE_ADDED}"
        )


def print_plan(steps: dict[int, Path], run: str) -> None:
    """Print which checkpoint becomes which step."""
    print(f"{len(steps)} {'step' if len(steps) == 1 else 'steps'} for the run {run}:")
    for step, path in steps.items():
        print(f"  {path.name} -> step {step}", flush=True)


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
    print(
        f"step {step}: {path.name} is left out: the run has step {newest}, and {CANNOT_BE_ADDED}. Import all steps into"
        f" a new run, with --base {run}",
        file=sys.stderr,
    )
    return False


def import_step(path: Path, url: str, run: str, step: int, base: str | None) -> bool:
    """Import a checkpoint, compare it, and return whether the step has all of it."""
    try:
        report = import_checkpoint(path, url, run=run, step=step, base=base)
    except (CorruptionError, UnsupportedError, UsageError) as error:
        print(f"step {step}: {path.name} is refused: {error}", file=sys.stderr)
        return False
    print(f"step {step}: {path.name}, {report.format}, {report.bytes_written} of {report.bytes_state} bytes new")
    return compare(path, url, run, step)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the local folder with the checkpoints")
    parser.add_argument("repository", help="where they are stored: a folder or URL")
    parser.add_argument("--run", required=True, help="the name of the run")
    parser.add_argument(
        "--files",
        action="append",
        metavar="PATTERN",
        help="import these only, such as 'step_*'; {step} stands for the number of the step; may be repeated",
    )
    parser.add_argument(
        "--base", metavar="RUN", help="another run: chunks that its newest step has are not stored again"
    )
    parser.add_argument("--skip-refused", action="store_true", help="import the other steps if some are refused")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the steps and check the files, and import nothing"
    )
    args = parser.parse_args()
    if "://" in args.folder:
        sys.exit(f"{args.folder} is a URL: import reads local files; copy it to a disk first")
    if not Path(args.folder).is_dir():
        sys.exit(f"{args.folder} is not a folder: give the folder with the checkpoints")
    return args


def main() -> None:
    args = arguments()
    patterns = args.files or ["*"]
    steps, ambiguous = steps_of(Path(args.folder), patterns, args.run)
    require_known_steps(ambiguous, args.skip_refused)
    if not steps:
        sys.exit(f"{args.folder} has no file or folder {' '.join(patterns)} whose name ends in the number of a step")
    print_plan(steps, args.run)
    newest = has_step(args.repository, args.run, "latest")
    new = {step: path for step, path in steps.items() if step > newest}
    unsafe = refused(new, args.repository, args.run)
    if unsafe and not args.skip_refused:
        sys.exit(
            "nothing was imported: convert these files, or copy damaged ones again, or leave them out with"
            f" --skip-refused; {CANNOT_BE_ADDED}"
        )
    complete = not unsafe and not ambiguous
    if args.dry_run:
        sys.exit(0 if complete else 1)
    for step, path in steps.items():
        if step in unsafe:
            continue
        if step <= newest:
            complete &= is_there(path, args.repository, args.run, step, newest)
        elif not import_step(path, args.repository, args.run, step, args.base):
            complete = False
            if not args.skip_refused:
                break
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    try:
        main()
    except HeadraceError as error:
        sys.exit(str(error))
