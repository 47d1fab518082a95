"""What a pack will do, decided before anything is read: which groups of files make which shards.

Invariants: the plan is a function of the inputs' names, sizes and times, of the recipe and of the library versions, and of
nothing else. A unit is a run of neighbouring groups of at most `UNIT_GROUPS`, whose files as they are would fill one shard (with
a recipe, four, since what comes of it is smaller). Its shards depend on it alone, so units can be packed in any order, by anyone,
and again.
Failure behaviour: none; whoever packs a unit finds that files changed.
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
"""Called with groups, bytes and skipped ones that are further done."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How every unit is packed. `salt` goes into shard names, so that later versions do not name shards of earlier ones."""

    shard_bytes: int
    recipe: Recipe = Recipe()
    strict: bool = False
    salt: int = 0


class Unit(msgspec.Struct, frozen=True):
    """The groups of one unit and its place in the plan."""

    number: int
    groups: tuple[Group, ...]


def units(groups: Sequence[Group], settings: Settings) -> list[Unit]:
    """The plan."""
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
    """What the group takes of a shard when nothing is changed."""
    sizes = [(f"{group.key}.{ext}", size) for (ext, _), size in zip(group.files, group.sizes, strict=True)]
    for ext, text in (("txt", group.caption), ("json", group.fields)):
        if text is not None and all(ext != have for have, _ in group.files):
            sizes.append((f"{group.key}.{ext}", len(text.encode())))
    return sum(tar.member_bytes(name, length) for name, length in sizes)


def digest(groups: Sequence[Group], settings: Settings, append: bool) -> str:
    """The name of the plan: equal plans have equal names."""
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
