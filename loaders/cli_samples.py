"""`headrace samples` lists the samples of each step of a training run, from the state of its loader.

Purpose: after a jump of the loss, find the samples that the model saw. `loader_of_state` makes a loader with the order
that a state describes. `BaseLoader.samples_of_steps` lists the samples of any loader.
Invariants: the loader's fingerprint equals that of the state, so the samples are those of the run. Only the index is
read.
Failure behaviour: `MismatchError` if the state belongs to another version of the dataset. `UsageError` for states that
do not describe the whole order: those of mixtures, buckets, packing and very long descriptions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.dataio.core.cli import (
    argument,
    command,
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

_ABOUT = "List the keys of the samples of each step, from the state of a loader. No media are read."
_MORE = """\
FILE holds what state_dict() returned, as JSON: a file that a trainer wrote, or `headrace ckpt` read from a checkpoint.
A step is a global batch; steps are counted from the first batch of epoch 0, and the state is at step `epoch * batches +
batch`. Samples that were damaged were replaced by others: the state and `headrace quarantine` list them.
States of mixtures, buckets and packing do not describe the whole order. In Python, every loader has
`loader.samples_of_steps(range(A, B))`.

exit codes: 0 listed · 1 with --find-in: none of the samples was seen · 2 wrong use, or a state of other data"""


def _step(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


@command(
    "samples",
    _ABOUT,
    argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix"),
    argument("--state", metavar="FILE", required=True, help="the state of the loader, as JSON"),
    argument("--from-step", metavar="A", type=_step, help="first step (default: 0)"),
    argument("--to-step", metavar="B", type=_step, help="the step after the last (default: that of the state)"),
    argument("--ranks", metavar="N", type=positive_int, help="also list the rank of each sample, of N ranks"),
    argument("--find-in", metavar="KEYS", help="a file with a key a line: list only these samples"),
    version(),
    where(),
    trust_mounts(),
    json_option("one JSON object a sample"),
    epilog=_MORE,
)
def samples(args: argparse.Namespace) -> int:
    """Run `headrace samples DATASET --state FILE`."""
    from headrace.dataio.shards.dataset import Dataset

    state = _read_state(args.state)
    suspects = None if args.find_in is None else set(Path(args.find_in).read_text("utf-8").splitlines())
    number = args.version if args.version is not None else state.get("version")
    with (
        Dataset.open_lazy(args.dataset, number, trust_mounts=args.trust_mounts) as dataset,
        loader_of_state(dataset if args.where is None else dataset.where(args.where), state) as loader,
    ):
        last = args.to_step if args.to_step is not None else loader.epoch * len(loader) + int(state["batch"])
        return _print(loader, range(args.from_step or 0, last), args.ranks, suspects, as_json=args.json)


def _print(loader: BaseLoader, steps: range, ranks: int | None, suspects: set[str] | None, *, as_json: bool) -> int:
    shown = 0
    for step in loader.samples_of_steps(steps, ranks or 1):
        for rank, share in enumerate(step.ranks):
            for sample in share:
                if suspects is not None and sample.key not in suspects:
                    continue
                shown += 1
                row = {"step": step.step, "epoch": step.epoch, "batch": step.batch, "rank": rank, "key": sample.key}
                if ranks is None:
                    del row["rank"]
                if as_json:
                    print_json_line(row)
                else:
                    print(*row.values(), sep="\t")
    return 1 if suspects is not None and not shown else 0


def _read_state(path: str) -> Mapping[str, Any]:
    data = Path(path).read_bytes()
    try:
        if len(data) > JSON_DOCUMENT_BYTES:
            raise ValueError("it is too large")
        state: object = json.loads(data)
    except ValueError as error:
        raise UsageError(f"{path} is not the state of a loader: {error}") from None
    if not isinstance(state, dict) or {"seed", "epoch", "batch"} - set(state):
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
        raise _not_whole()
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
            raise _not_whole() from error
        raise
    return loader


def _loader(dataset: Dataset, clip: Any, **options: Any) -> BaseLoader:
    """A loader with the parts that `clip` of a state describes."""
    from headrace.loaders.field_loader import Loader
    from headrace.loaders.file_loader import FileLoader

    options = {"rank": 0, "world_size": 1, "num_threads": 1, "sidecar": None} | options
    if not isinstance(clip, list) or not clip:
        raise _not_whole()
    if clip[0] == "files":
        return FileLoader(dataset, files=clip[1:], **options)
    if all(isinstance(value, list | str) for value in clip):
        media = [value for value in clip if isinstance(value, list)]
        files = tuple(value for value in clip if isinstance(value, str) and value != "text")
        fields: dict[str, Any] = {f"media{number}": _media(value) for number, value in enumerate(media)}
        fields["files"] = _needs(files, uses_caption="text" in clip)
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
        raise _not_whole() from None


def _needs(files: tuple[str, ...], *, uses_caption: bool) -> Any:
    """A field that only leaves samples out."""
    from headrace.loaders.fields.base import Field

    @dataclass(frozen=True)
    class Needs(Field):
        files: tuple[str, ...]
        uses_caption: bool

        def decode(self, data: Any) -> None:
            return None

    return Needs(files, uses_caption)


def _not_whole() -> UsageError:
    return UsageError(
        "this state does not describe the whole order of its loader",
        hint="make the loader as the trainer does, and call loader.samples_of_steps(range(A, B))",
    )
