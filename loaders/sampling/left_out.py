"""The samples that have all that a loader needs of them. The log says how many samples are left out, and why.

Purpose: a sample without a required file, video or sound is left out of an epoch. A mistyped extension, or a file that a
job did not write, would otherwise shorten the epoch without a trace.
Invariant: one warning of the job for each file or medium that samples lack, and one for images that are left out. Each
is logged once.
Failure behaviour: `UsageError` if no sample is left. It names the files that the samples lack, and those that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.sampling.columns import AllOf, HasFiles, HasValue, samples_and_missing
from headrace.loaders.sampling.never_delivered import warn_of_images
from headrace.loaders.sampling.sample_ids import SampleIds

MAX_SHOWN = 64
"""The maximum number of extensions that an error lists."""
_CONTENTS = {"video_ext": "a video", "audio_codec": "sound", "text": "a caption"}

_log = get_logger(__name__)


def samples_with_all(
    dataset: Dataset,
    conditions: Sequence[HasFiles | HasValue],
    optional: Collection[HasFiles | HasValue] = (),
    wanted: str = "",
) -> SampleIds:
    """The ids of the samples that meet all conditions.

    Args:
        dataset: the dataset or view.
        conditions: one for each file or content that a sample must have.
        optional: conditions of fields that may have `required=False`, which the warning then names.
        wanted: what the error says that no sample has. Default: the files.

    Raises:
        UsageError: no sample meets all conditions, or the dataset has no sample.
    """
    all_of = AllOf(tuple(conditions))
    ids, missing = samples_and_missing(dataset, all_of)
    if not len(ids):
        raise _none_left(dataset, conditions, missing, wanted)
    images = warn_of_images(dataset, all_of, len(ids))
    for condition, count in missing.items():
        if isinstance(condition, HasValue) and condition.without:
            count -= images  # the images have a warning of their own
        if not count:
            continue
        hint = "; required=False keeps them" if condition in optional else ""
        samples = f"{count:,} of {len(dataset):,} samples of {dataset.url}"
        warn_once(_log, f"{samples} lack {_name(condition)} and are left out{hint}", "job")
    return ids


def _none_left(
    dataset: Dataset,
    conditions: Sequence[HasFiles | HasValue],
    missing: Mapping[HasFiles | HasValue, int],
    wanted: str,
) -> UsageError:
    problem = f"{dataset.url} has no sample with {wanted or ', '.join(map(_name, conditions))}"
    total = len(dataset)
    if absent := [condition for condition, count in missing.items() if count == total]:
        problem += f": no sample has {' or '.join(map(_name, absent))}" if wanted else ""
    else:
        problem += ": " + ", ".join(
            f"{count:,} of {total:,} samples lack {_name(condition)}" for condition, count in missing.items()
        )
    there = ", ".join(f".{ext}" for ext in _extensions_in(dataset)[:MAX_SHOWN]) or "no files"
    hints = [f"there are: {there}"]
    if HasValue("text") in absent:
        hints.append("captions in .json files need `headrace pack` or `headrace index` with --text-field NAME")
    if any(isinstance(condition, HasValue) and condition.without for condition in conditions):
        hints.append("images are clips of one frame: Clip(frames=1)")
    if wanted:
        hints.append("fields with required=False leave no sample out")
    return UsageError(problem, hint="; ".join(hints))


def _name(condition: HasFiles | HasValue) -> str:
    if isinstance(condition, HasFiles):
        return ", ".join(f".{ext}" for ext in condition.extensions)
    name = _CONTENTS[condition.column]
    return f"{name} or an image" if name == "a video" and not condition.without else name


def _extensions_in(dataset: Dataset) -> list[str]:
    """The extensions of all files of a dataset, in order."""
    from headrace.dataio.shards.index import arrow as pc

    extensions = set[str]()
    for table in dataset.index.tables(["members"]):
        for members in table["members"].chunks:
            extensions |= set(pc.unique(pc.struct_field(pc.list_flatten(members), ["ext"])).to_pylist())
    return sorted(extensions)
