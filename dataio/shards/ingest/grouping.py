"""Groups files into samples, and gives the samples keys.

Purpose: the user chooses which files are one sample (`GROUPS`):

* "stem": the files of one folder whose names differ only in the last suffix. `clip.mp4` and `clip.json` are the sample
  `clip`. Files such as `clip.latent.npy` join `clip.mp4`.
* "dot": the files of one folder whose names are equal up to the first dot, as in WebDataset. `ep1.cam0.mp4`,
  `ep1.cam1.mp4` and `ep1.state.npy` are the sample `ep1`.
* "folder": the files of one folder. The key is the folder, and the extension of a file is its name, `cam0.mp4`.

Invariants:

* A group depends only on the names of its files.
* A key is relative to the source. Dots, backslashes and control characters in it become `_`. A tar reader that cuts at
  the first dot then finds the same key.
* Extensions are in lower case.

Failure behaviour: two files that would be the same member of a sample raise `UsageError` with both paths.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.ingest.row_messages import RowRef
from headrace.dataio.shards.ingest.source_stores import FileStat, is_url
from headrace.dataio.shards.media.container import KNOWN_EXTENSIONS
from headrace.dataio.shards.media.messages import Span

Grouping = Literal["stem", "dot", "folder"]
GROUPS: tuple[Grouping, ...] = get_args(Grouping)
_FORBIDDEN_IN_KEYS = re.compile(r"[.\\\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one sample: (extension, path), sorted by extension.

    `sizes` holds the size of each file when it was found, and `bytes` their sum. `stamp` is the newest modification
    time in nanoseconds, and `times` holds that of each file. `spans`, if there are any, give the offset and length of
    each member in its file. `caption` and `fields` (a JSON object) come from a manifest. `row`, if there is one, is a row
    with embedded media: its files are found when it is read, so `files` has the table, and the size is an estimate.
    """

    key: str
    files: tuple[tuple[str, str], ...]
    bytes: int
    stamp: int = 0
    sizes: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    caption: str | None = None
    fields: str | None = None
    times: tuple[int, ...] = ()
    row: RowRef | None = None

    @property
    def order(self) -> str:
        """Groups are sorted by this."""
        return self.row.default_key if self.row else self.key

    @property
    def display_name(self) -> str:
        """The name in messages to the user."""
        return self.row.display_name if self.row else self.files[0][1]

    def members(self) -> tuple[Span, ...]:
        """Return the files as the spans that a worker takes."""
        spans = self.spans or ((0, -1),) * len(self.files)
        return tuple(Span(ext, path, *span) for (ext, path), span in zip(self.files, spans, strict=True))

    @property
    def is_remote(self) -> bool:
        """Whether any of the files lies in a store."""
        return any(is_url(path) for _, path in self.files)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file or an object found in a source. Its key is relative to `root`."""

    root: str
    path: str
    is_named: bool = False  # the user named this file; it was not found in a folder
    from_glob: bool = False  # a glob matched this file
    info: FileStat | None = None  # set if the listing gave it
    several_dots: str = ""  # the extension, if it is not the last suffix: `latent.npy`

    @property
    def ext(self) -> str:
        """The extension by which the sample names the file."""
        return self.several_dots or last_suffix(self.path)

    @property
    def split(self) -> tuple[str, str]:
        """The folder and the name."""
        return os.path.split(self.path if is_url(self.path) else os.path.abspath(self.path))


FoundFile = tuple[InputFile, FileStat]


def check_grouping(name: str) -> Grouping:
    """Check the user's choice, and return it."""
    for grouping in GROUPS:
        if name == grouping:
            return grouping
    raise UsageError(f"group must be one of {', '.join(GROUPS)}, not {name!r:.100}", hint="the default is stem")


def divide_into_samples(files: Iterable[FoundFile], grouping: Grouping) -> list[list[FoundFile]]:
    """Divide the files into those of each sample."""
    by_sample = dict[tuple[str, str], list[FoundFile]]()
    split = _SPLIT[grouping]
    for item, info in files:
        folder, name = item.split
        stem, ext = split(name)
        named = dataclasses.replace(item, several_dots=ext) if ext else item
        by_sample.setdefault((folder, stem), []).append((named, info))
    if grouping == "stem":
        _join_to_media(by_sample)
    return list(by_sample.values())


def _cut_at_first_dot(name: str) -> tuple[str, str]:
    start, dot, rest = name[1:].partition(".")
    return (name[0] + start, rest.lower()) if dot else (name, "")


_SPLIT: dict[Grouping, Callable[[str], tuple[str, str]]] = {
    "stem": lambda name: (Path(name).stem, ""),
    "dot": _cut_at_first_dot,
    "folder": lambda name: ("", name.lower()),
}
"""How each grouping cuts a name into the sample's stem and the extension. "" stands for the last suffix."""


def _join_to_media(by_stem: dict[tuple[str, str], list[FoundFile]]) -> None:
    """Join files such as `clip.latent.npy` to the files of the media file with the shorter stem, `clip.mp4`.

    A file that has the extension of a medium in its name, such as `clip.mp4.part`, joins none.
    """
    with_media = {
        stem for stem, files in by_stem.items() if any(last_suffix(item.path) in KNOWN_EXTENSIONS for item, _ in files)
    }
    for folder, stem in [one for one in by_stem if one not in with_media and "." in one[1]]:
        parts = stem.split(".")
        for count in range(len(parts) - 1, 0, -1):
            shorter = folder, ".".join(parts[:count])
            if shorter in with_media and not KNOWN_EXTENSIONS & {part.lower() for part in parts[count:]}:
                middle = ".".join(parts[count:])
                by_stem[shorter] += [
                    (dataclasses.replace(item, several_dots=f"{middle}.{last_suffix(item.path)}".lower()), info)
                    for item, info in by_stem.pop((folder, stem))
                ]
                break


def make_group(members: Sequence[FoundFile], grouping: Grouping = "stem") -> Group:
    """Return the group of these files, which are one sample."""
    files: dict[str, str] = {}
    for item, _ in members:
        existing = files.setdefault(item.ext, item.path)
        if existing != item.path:
            raise UsageError(
                f"{existing} and {item.path} would be the same member of a sample", hint="rename one of them"
            )
    named = [item for item, _ in members if not item.several_dots] or [item for item, _ in members]
    first = min(named, key=lambda item: item.path)
    stamp = max(info.modified_ns for _, info in members)
    found = {item.ext: info for item, info in members}
    exts = sorted(files)
    return Group(
        key_of(first, grouping),
        tuple((ext, files[ext]) for ext in exts),
        sum(info.size for info in found.values()),
        stamp,
        tuple(found[ext].size for ext in exts),
        times=tuple(found[ext].modified_ns for ext in exts),
    )


def key_of(item: InputFile, grouping: Grouping = "stem") -> str:
    """Return the key of the sample to which this file belongs."""
    if is_url(item.path):
        below = item.path.startswith(f"{item.root}/")
        inside = item.path[len(item.root) + 1 :] if below else item.path.partition("://")[2]
    else:
        inside = os.path.relpath(item.path, item.root)
        if inside.startswith("../"):  # a manifest may name files anywhere
            inside = os.path.abspath(item.path)[1:]
    folder, name = os.path.split(inside)
    if grouping == "folder":
        return clean_key(folder or os.path.basename(os.path.abspath(item.root)))
    return clean_key(os.path.join(folder, _SPLIT[grouping](name)[0]))


def clean_key(key: str) -> str:
    """Return the key with `_` for the characters that a key must not have."""
    return "/".join(_FORBIDDEN_IN_KEYS.sub("_", part) for part in key.split("/"))


def row_key(where: str, text: str) -> str:
    """Return the key of a row, named `where`, whose table calls it `text`."""
    key = clean_key(text)
    if set(key.split("/")) & {"", ".", ".."}:
        raise UsageError(f"{where}: {text!r} cannot be a key", hint="keys are relative, without '..'")
    return key


def last_suffix(path: str) -> str:
    """Return the last suffix of a path, in lower case and without the dot."""
    return os.path.splitext(path)[1][1:].lower()
