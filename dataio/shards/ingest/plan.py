"""The plan of a pack: it decides, before any file is read, which groups of files go into which shards.

Invariants:

* The plan depends only on the names, sizes and times of the inputs, the recipe and the other settings, and the library
  versions.
* A unit is a run of at most `UNIT_GROUPS` neighbouring groups, whose unchanged files would fill one shard. With a
  recipe, they would fill four shards, since the results are smaller.
* The shards of a unit depend only on the unit. Any process can therefore pack the units in any order, and pack a unit
  again.

Failure behaviour: none. If a file has changed since, the packer of its unit detects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import blake3
import msgspec

from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.sources import Group
from headrace.dataio.shards.media.facts import Recipe

FORMAT = 1
UNIT_GROUPS = 20_000

Step = Callable[[int, int, int], None]
"""A callback. Its arguments are the groups, bytes and skipped groups that were finished since the last call."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How every unit is packed.

    `salt` goes into the names of shards, so that a later version does not reuse the names of an earlier version's
    shards.
    """

    shard_bytes: int
    recipe: Recipe = Recipe()
    strict: bool = False
    salt: int = 0


class Unit(msgspec.Struct, frozen=True):
    """The groups of one unit, and its number in the plan."""

    number: int
    groups: tuple[Group, ...]


def units(groups: Sequence[Group], settings: Settings) -> list[Unit]:
    """Divide the groups into units."""
    limit = settings.shard_bytes * (4 if settings.recipe.changes else 1)
    return [Unit(number, run) for number, run in enumerate(_runs(groups, limit))]


def _runs(groups: Sequence[Group], limit: int) -> Iterator[tuple[Group, ...]]:
    run, total = list[Group](), len(tar.END)
    for group in groups:
        size = _expected(group)
        if run and (total + size > limit or len(run) >= UNIT_GROUPS):
            yield tuple(run)
            run, total = [], len(tar.END)
        run.append(group)
        total += size
    if run:
        yield tuple(run)


def _expected(group: Group) -> int:
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
encode_unit = msgspec.msgpack.Encoder().encode
decode_unit = msgspec.msgpack.Decoder(Unit).decode
