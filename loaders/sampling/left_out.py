"""The samples that have all that a loader needs of them. The log says how many samples are left out, and why.

Purpose: a sample without a required file, video or sound is left out of an epoch. A mistyped extension, or a file that a
job did not write, would otherwise shorten the epoch without a trace.
Invariant: one warning of the job for each file or medium that samples lack, one for each optional file that no sample
has, and one for images that are left out. Each is logged once.
Failure behaviour: `UsageError` if no sample is left. It names the files that the samples lack, and those that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger, is_first, warn_once
from headrace.dataio.core.suggestions import did_you_mean
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.container import VIDEO_EXTENSIONS
from headrace.loaders.sampling.columns import AllOf, HasFiles, HasValue, samples_and_missing
from headrace.loaders.sampling.never_delivered import images_left_out, warn_of_images
from headrace.loaders.sampling.sample_ids import SampleIds

MAX_SHOWN = 64
"""The maximum number of extensions that an error lists."""
KEEPS = "required=False keeps them"
"""What a warning says of samples that an option of their field keeps."""
_CONTENTS = {"video_ext": "a video", "audio_codec": "sound", "text": "a caption"}

_log = get_logger(__name__)


def samples_with_all(
    dataset: Dataset,
    conditions: Sequence[HasFiles | HasValue],
    keeps: Mapping[HasFiles | HasValue, str] = MappingProxyType({}),
    wanted: str = "",
) -> SampleIds:
    """The ids of the samples that meet all conditions.

    Args:
        dataset: the dataset or view.
        conditions: one for each file or content that a sample must have.
        keeps: for each condition of a field with an option that keeps the samples, what warnings and errors say of it,
            such as `KEEPS`. Default: none.
        wanted: what the error says that no sample has. Default: the files.

    Raises:
        UsageError: no sample meets all conditions, or the dataset has no sample.
    """
    all_of = AllOf(tuple(conditions))
    ids, missing = samples_and_missing(dataset, all_of)
    if not len(ids):
        raise _none_left(dataset, conditions, missing, keeps, wanted)
    images = warn_of_images(dataset, all_of, len(ids))
    for condition, count in missing.items():
        if isinstance(condition, HasValue) and condition.without:
            count -= images  # the images have a warning of their own
        if not count:
            continue
        hint = f"; {keeps[condition]}" if condition in keeps else ""
        samples = f"{count:,} of {len(dataset):,} samples of {dataset.url}"
        warn_once(_log, f"{samples} lack {_name(condition)} and are left out{hint}", "job")
    return ids


def warn_of_absent_files(dataset: Dataset, extensions: Collection[str]) -> None:
    """Log which of these optional files no sample has, once for each job.

    One process of the job reads parts of the index until it has found all of the files.
    """
    unknown = set(extensions) - dataset.index.files_of_all
    if not unknown or not len(dataset) or not is_first("job"):
        return
    there = _extensions_in(dataset, unknown)
    for ext in sorted(unknown.difference(there)):
        hint = _grouping_hint([ext])
        problem = f"no sample of {dataset.url} has .{ext}{_similar(ext, there)}"
        warn_once(_log, f"{problem}, so no batch has values for it{'; ' if hint else ''}{hint}", "job")


def _none_left(
    dataset: Dataset,
    conditions: Sequence[HasFiles | HasValue],
    missing: Mapping[HasFiles | HasValue, int],
    keeps: Mapping[HasFiles | HasValue, str],
    wanted: str,
) -> UsageError:
    total, there = len(dataset), _extensions_in(dataset)
    absent = [condition for condition, count in missing.items() if count == total]
    absent_files = [ext for condition in absent if isinstance(condition, HasFiles) for ext in condition.extensions]
    names = {condition: _name(condition) for condition in conditions}
    names |= {HasFiles((ext,)): f".{ext}{_similar(ext, there)}" for ext in absent_files}
    problem = f"{dataset.url} has no sample with {wanted or ', '.join(names.values())}"
    if absent:
        problem += f": no sample has {' or '.join(names[one] for one in absent)}" if wanted else ""
    else:
        problem += ": " + ", ".join(
            f"{count:,} of {total:,} samples lack {_name(condition)}" for condition, count in missing.items()
        )
    hints = [
        f"there are: {', '.join(f'.{ext}' for ext in there[:MAX_SHOWN]) or 'no files'}",
        _grouping_hint(absent_files),
    ]
    if HasValue("text") in absent:
        hints.append("captions in .json files need `headrace pack` or `headrace index` with --text-field NAME")
    if any(images_left_out(dataset, AllOf((condition,)), total - count) for condition, count in missing.items()):
        hints.append("images are clips of one frame: Clip(frames=1)")
    hints += dict.fromkeys(f"samples without {_name(one)}: {keeps[one]}" for one in missing if one in keeps)
    return UsageError(problem, hint="; ".join(filter(None, hints)))


def _similar(ext: str, there: Sequence[str]) -> str:
    return did_you_mean(f".{ext}", [f".{one}" for one in there])


def _grouping_hint(absent: Sequence[str]) -> str:
    """How the files of further videos, such as `clip.cam1.mp4`, become files of the sample `clip`."""
    if not any("." in ext and ext.rpartition(".")[2] in VIDEO_EXTENSIONS for ext in absent):
        return ""
    return "a folder with further videos of a sample needs `headrace pack` or `headrace index` with --group dot"


def _name(condition: HasFiles | HasValue) -> str:
    if isinstance(condition, HasFiles):
        return ", ".join(f".{ext}" for ext in condition.extensions)
    name = _CONTENTS[condition.column]
    return f"{name} or an image" if name == "a video" and not condition.without else name


def _extensions_in(dataset: Dataset, wanted: Collection[str] = ()) -> list[str]:
    """The extensions of all files of a dataset, in order. With `wanted`, the search ends when these are found."""
    from headrace.dataio.shards.index import arrow as pc

    extensions = set[str]()
    for table in dataset.index.tables(["members"]):
        for members in table["members"].chunks:
            extensions |= set(pc.unique(pc.struct_field(pc.list_flatten(members), ["ext"])).to_pylist())
        if wanted and extensions.issuperset(wanted):
            break
    return sorted(extensions)
