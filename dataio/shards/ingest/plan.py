"""The plan of a pack, and the records of its units.

Purpose: `units` divides the groups of files into units before any file is read. `PackedUnit` is the record of a packed
unit. The journal lies in the destination, below `packing/<plan>`, until the version exists
(`headrace.dataio.shards.units.journal`).

Invariants:

* The plan depends only on the names, sizes and times of the inputs, the recipe and the other settings, and the library
  versions. Equal plans have equal names (`digest`).
* A unit is a run of at most `UNIT_GROUPS` adjacent groups, whose unchanged files would fill one shard. With a recipe,
  they would fill four shards, since the results are smaller.
* The shards of a unit depend only on the unit.

Failure behaviour: planning raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import blake3
import msgspec

from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.media.messages import Recipe
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.units.journal import Done, Record, StoredJournal, Unit
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store

FORMAT = 1
UNIT_GROUPS = 20_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that apply to every unit.

    `text_field` is the field of the samples' JSON that holds their text. `salt` goes into the names of shards, so that
    a later version does not reuse the names of an earlier version's shards.
    """

    shard_bytes: int
    recipe: Recipe = Recipe()
    strict: bool = False
    text_field: str | None = None
    salt: int = 0


class PackUnit(Unit, frozen=True):
    """The groups of one unit, and its number in the plan."""

    groups: tuple[Group, ...]


def units(groups: Sequence[Group], settings: Settings) -> list[PackUnit]:
    """Divide the groups into units."""
    limit = settings.shard_bytes * (4 if settings.recipe.changes else 1)
    return [PackUnit(number, run) for number, run in enumerate(_runs(groups, limit))]


def _runs(groups: Sequence[Group], limit: int) -> Iterator[tuple[Group, ...]]:
    run, total = list[Group](), len(tar.END)
    for group in groups:
        size = _packed_bytes(group)
        if run and (total + size > limit or len(run) >= UNIT_GROUPS):
            yield tuple(run)
            run, total = [], len(tar.END)
        run.append(group)
        total += size
    if run:
        yield tuple(run)


def _packed_bytes(group: Group) -> int:
    """Return the bytes that the group takes in a shard if no recipe changes it."""
    sizes = [(f"{group.key}.{ext}", size) for (ext, _), size in zip(group.files, group.sizes, strict=True)]
    for ext, text in (("txt", group.caption), ("json", group.fields)):
        if text is not None and all(ext != have for have, _ in group.files):
            sizes.append((f"{group.key}.{ext}", len(text.encode())))
    return sum(tar.member_bytes(name, length) for name, length in sizes)


def digest(groups: Sequence[Group], settings: Settings, append: bool) -> str:
    """Return the name of the plan. Equal plans have equal names."""
    hasher = blake3.blake3(msgspec.json.encode([FORMAT, append, settings, _versions()]))
    for group in groups:
        hasher.update(encode_group(group))
    return hasher.hexdigest()[:32]


def _versions() -> list[str]:
    from importlib.metadata import version

    return [version("headrace"), version("av")]


encode_group = msgspec.msgpack.Encoder().encode


class PackedUnit(Record, frozen=True, kw_only=True):
    """The result of packing one unit.

    The samples are numbered from 0. `files` counts only the input files that were packed. `groups` and `bytes` count
    all input.
    """

    shards: tuple[Shard, ...]
    samples: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    files: int
    groups: int
    bytes: int

    @property
    def done(self) -> Done:
        """The work of the unit."""
        return Done(self.groups, self.bytes, len(self.samples), len(self.skipped))


def journal_of(store: Store, plan: str) -> StoredJournal[PackedUnit]:
    """Return the journal of the pack with this plan, in the dataset's own store."""
    return StoredJournal(store, f"packing/{plan}", PackedUnit)
