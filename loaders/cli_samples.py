"""`headrace samples` lists the samples of each step of a training run, from the state of its loader.

The state is in a file, or in a step of a checkpoint repository.

Purpose: after a loss spike, find the samples that the model saw. `loader_of_state` makes a loader with the order
that a state describes. `BaseLoader.samples_of_steps` lists the samples of any loader.
Invariants: the loader's fingerprint equals that of the state, so the samples are those of the run. Only the index is
read.
Failure behaviour: `MismatchError` if the state belongs to another version of the dataset. `UsageError` for states that
do not describe the whole order: those of mixtures, buckets and packing, and those that hold only a digest of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.dataio.cli import shared
from headrace.dataio.core.cli import (
    argument,
    command,
    group,
    json_option,
    positive_int,
    print_json_line,
    trust_mounts,
    version,
    where,
)
from headrace.dataio.core.errors import MismatchError, UsageError
from headrace.dataio.core.limits import JSON_DOCUMENT_BYTES

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset
    from headrace.loaders.loader import BaseLoader

_STATE_KEYS = {"seed", "epoch", "batch"}
"""Every state of a loader has these."""
_ABOUT = "List the keys of the samples of each step, from the state of a loader. No media are read."
_MORE = """\
The state is in FILE as JSON, as the loader's state_dict() returned it, or in a step of a checkpoint repository. --step
chooses that step. --name is needed only if it holds several loaders.
For --from-step and --to-step, a step is a global batch. They are counted from the first batch of epoch 0, so the state
is at step `epoch * batches + batch`. Damaged samples were replaced by others: the state and `headrace quarantine` list
them.
States of mixtures, buckets and packing do not describe the whole order. In Python, every loader has
`loader.samples_of_steps(range(A, B))`.

exit codes: 0 listed · 1 with --find-in: none of the samples was seen · 2 wrong use, or a state of another dataset version"""


def _step(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


@command(
    "samples",
    _ABOUT,
    argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix"),
    group(
        "the state of the loader",
        argument("--state", metavar="FILE", help="a file with the state as JSON; - reads standard input"),
        argument("--checkpoint", metavar="URL", help="a checkpoint repository that holds the state"),
        argument("--run", metavar="RUN", help="with --checkpoint: the run; `headrace ckpt ls URL` lists them"),
        argument("--step", metavar="STEP", help="with --checkpoint: a number, latest (default), or tag:NAME"),
        argument("--name", metavar="NAME", help="with --checkpoint: the loader's path in the saved state"),
    ),
    argument("--from-step", metavar="A", type=_step, help="first step (default: 0)"),
    argument("--to-step", metavar="B", type=_step, help="the step after the last one (default: that of the state)"),
    argument("--ranks", metavar="N", type=positive_int, help="also list the rank of each sample, of N ranks"),
    argument("--find-in", metavar="KEYS", help="a file with one key per line: list only these samples"),
    version(),
    where(),
    trust_mounts(),
    json_option("one JSON object a sample"),
    epilog=_MORE,
)
def samples(args: argparse.Namespace) -> int:
    """Run `headrace samples DATASET --state FILE`."""
    from headrace.dataio.shards.dataset import Dataset

    state = _state_of(args)
    wanted_keys = None if args.find_in is None else set(Path(args.find_in).read_text("utf-8").splitlines())
    number = args.version if args.version is not None else state.get("version")
    with (
        Dataset.open_lazy(args.dataset, number, trust_mounts=args.trust_mounts) as dataset,
        loader_of_state(dataset if args.where is None else dataset.where(args.where), state) as loader,
    ):
        stop = args.to_step if args.to_step is not None else loader.epoch * len(loader) + int(state["batch"])
        return _print(loader, range(args.from_step or 0, stop), args.ranks, wanted_keys, as_json=args.json)


def _print(loader: BaseLoader, steps: range, ranks: int | None, wanted_keys: set[str] | None, *, as_json: bool) -> int:
    listed = 0
    for step in loader.samples_of_steps(steps, ranks or 1):
        for rank, share in enumerate(step.ranks):
            for sample in share:
                if wanted_keys is not None and sample.key not in wanted_keys:
                    continue
                listed += 1
                row = {"step": step.step, "epoch": step.epoch, "batch": step.batch, "rank": rank, "key": sample.key}
                if ranks is None:
                    del row["rank"]
                if as_json:
                    print_json_line(row)
                else:
                    print(*row.values(), sep="\t")
    return 1 if wanted_keys is not None and not listed else 0


def _state_of(args: argparse.Namespace) -> Mapping[str, Any]:
    """The state that the arguments name."""
    if (args.state is None) == (args.checkpoint is None):
        raise UsageError("give either --state or --checkpoint", hint="--state FILE, or --checkpoint URL --run RUN")
    if args.checkpoint is not None:
        if args.run is None:
            raise UsageError("--checkpoint needs --run", hint="`headrace ckpt ls URL` lists the runs")
        return _checkpointed_state(args.checkpoint, args.run, args.step or "latest", args.name)
    if given := [name for name in ("run", "step", "name") if getattr(args, name) is not None]:
        raise UsageError(f"--{given[0]} is for --checkpoint", hint="leave it out with --state")
    return _read_state(args.state)


def _checkpointed_state(url: str, run: str, step: str, name: str | None) -> Mapping[str, Any]:
    """The state of the loader in this step. All ranks save the same position, so rank 0's is read."""
    states = shared("object_states")(url, run, step)
    loaders = {path: one for path, one in states.items() if not _STATE_KEYS - set(one)}
    state: Mapping[str, Any] = shared("object_state")(loaders, name, "state of a loader")
    return state


def _read_state(path: str) -> Mapping[str, Any]:
    limit = JSON_DOCUMENT_BYTES + 1
    if path == "-":
        path, data = "standard input", sys.stdin.buffer.read(limit)
    else:
        with Path(path).open("rb") as file:
            data = file.read(limit)
    try:
        if len(data) > JSON_DOCUMENT_BYTES:
            raise ValueError("it is too large")
        state: object = json.loads(data)
    except ValueError as error:
        raise UsageError(f"{path} is not the state of a loader: {error}") from None
    if not isinstance(state, dict) or _STATE_KEYS - set(state):
        raise UsageError(f"{path} is not the state of a loader", hint="write json.dumps(loader.state_dict()) to it")
    return state


def loader_of_state(dataset: Dataset, state: Mapping[str, Any]) -> BaseLoader:
    """Return a loader of one rank that delivers the samples of `state` in its order, at its position.

    Raises:
        MismatchError: the state belongs to another version of the dataset.
        UsageError: the state does not describe the whole order.
    """
    from headrace.loaders.sampling.state import read

    described, _ = read(state)
    order, batch = described.get("order"), described.get("global_batch")
    if "sources" in described or not isinstance(batch, int) or not isinstance(order, list):
        raise _incomplete_state()
    loader = _loader(
        dataset,
        described.get("clip"),
        batch_size=batch,
        seed=described["seed"],
        shuffle=any(isinstance(value, int) for value in order),
        drop_last="drop_last" in order,
        evaluate=order == ["evaluation"],
    )
    try:
        loader.load_state_dict(state)
    except MismatchError as error:
        loader.close()
        if "order" in str(error) or "clip" in str(error):
            raise _incomplete_state() from error
        raise
    return loader


def _loader(dataset: Dataset, clip: Any, **options: Any) -> BaseLoader:
    """A loader with the parts that `clip` of a state describes."""
    from headrace.loaders.field_loader import Loader
    from headrace.loaders.file_loader import FileLoader

    options = {"rank": 0, "world_size": 1, "num_threads": 1, "sidecar": None} | options
    if not isinstance(clip, list) or not clip:
        raise _incomplete_state()
    if clip[0] == "files":
        return FileLoader(dataset, files=clip[1:], **options)
    if all(isinstance(value, list | str) for value in clip):
        media = [value for value in clip if isinstance(value, list)]
        files = tuple(value for value in clip if isinstance(value, str) and value != "text")
        fields: dict[str, Any] = {f"media{number}": _media(value) for number, value in enumerate(media)}
        fields["files"] = _required_files(files, uses_caption="text" in clip)
        return Loader(dataset, fields=fields, **options)
    return Loader(dataset, fields={"media": _media(clip)}, **options)


def _media(values: Sequence[Any]) -> Any:
    """The field of a clip or window, from its description."""
    from headrace.loaders.clip import Clip
    from headrace.loaders.fields.audio import Audio
    from headrace.loaders.fields.video import Video

    try:
        if len(values) > 3 and isinstance(values[3], str):
            return Video(Clip(*values))
        seconds, start, *others = values
        return Audio(seconds, start=start, **dict(zip(("per_sample", "jitter"), others, strict=False)))
    except (TypeError, ValueError):
        raise _incomplete_state() from None


def _required_files(files: tuple[str, ...], *, uses_caption: bool) -> Any:
    """A field without a value. It leaves out samples that lack these files or a caption."""
    from headrace.loaders.fields.base import Field

    @dataclass(frozen=True)
    class Needs(Field):
        files: tuple[str, ...]
        uses_caption: bool

        def decode(self, data: Any) -> None:
            return None

    return Needs(files, uses_caption)


def _incomplete_state() -> UsageError:
    return UsageError(
        "this state does not describe the whole order of its loader",
        hint="make the loader as the trainer does, and call loader.samples_of_steps(range(A, B))",
    )
