"""The plan of a pack, and the journal of its finished units.

Purpose: `units` divides the groups of files into units before any file is read. `Journal` records each unit that is
packed, so that an interrupted pack can continue after the last finished unit. The journal stays in the destination
until the version exists:

```
packing/<plan>/begun                      the version that the pack builds on (0: none)      put_if_absent
packing/<plan>/<number>.unit              a packed unit: its shards and rows                 BLAKE3, then msgpack
```

Invariants:

* The plan depends only on the names, sizes and times of the inputs, the recipe and the other settings, and the library
  versions. Equal plans have equal names (`digest`).
* A unit is a run of at most `UNIT_GROUPS` adjacent groups, whose unchanged files would fill one shard. With a recipe,
  they would fill four shards, since the results are smaller.
* The shards of a unit depend only on the unit. Any process can therefore pack the units in any order, and pack a unit
  again.
* The packer writes a unit's record after it has stored the unit's shards. Every shard that a record names therefore
  exists.
* Records are immutable and depend only on the plan. Two packers of one plan write the same records.
* Readers never use the folder `packing/`.

Failure behaviour: planning raises nothing. A damaged record counts as absent, and the packer packs its unit again. You
can delete the folder of a pack that will never be resumed.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, NotFoundError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.sources import Group
from headrace.dataio.shards.media.messages import Recipe, dec_hook, enc_hook
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store

FORMAT = 1
UNIT_GROUPS = 20_000

Step = Callable[[int, int, int], None]
"""A callback. Its arguments count the groups, bytes and skipped groups that were finished since the last call."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that apply to every unit.

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
encode_unit = msgspec.msgpack.Encoder().encode
decode_unit = msgspec.msgpack.Decoder(Unit).decode


# --- the journal

_RECORD_BYTES = 512 * limits.MIB
_NAME = re.compile(r"(\d{8})\.unit")


class PackedUnit(msgspec.Struct, frozen=True, kw_only=True):
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


class _Start(msgspec.Struct, frozen=True):
    base: int
    nonce: str


encode_packed = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
decode_packed = msgspec.msgpack.Decoder(PackedUnit, dec_hook=dec_hook).decode


class Journal:
    """Reads and writes the records of the plan `plan` in `store`."""

    def __init__(self, store: Store, plan: str) -> None:
        self.plan = plan
        self._store, self._prefix = store, f"packing/{plan}/"

    def begin(self, base: int) -> int:
        """Return the version that the pack builds on.

        This is `base`, unless an earlier start of the same pack recorded another version.
        """
        key = f"{self._prefix}begun"
        mine = msgspec.json.encode(_Start(base, secrets.token_hex(16)))
        if self._store.put_if_absent(key, mine):
            return base
        try:
            return msgspec.json.decode(self._store.get(key), type=_Start).base
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptionError(f"{key} is damaged", hint="delete the folder packing/ and pack again") from error

    def done(self) -> set[int]:
        """Return the numbers of the units that have a record."""
        matches = (_NAME.fullmatch(info.key.removeprefix(self._prefix)) for info in self._store.list(self._prefix))
        return {int(match[1]) for match in matches if match}

    def write(self, number: int, packed: PackedUnit) -> None:
        """Write the record of a packed unit."""
        body = encode_packed(packed)
        if len(body) > _RECORD_BYTES - 32:
            raise CapacityError("the index rows of one shard are too large", hint="pack into smaller shards")
        self._store.put(self._key(number), blake3.blake3(body).digest() + body)

    def read(self, number: int) -> PackedUnit | None:
        """Return the record of a unit, or None if the record is missing or damaged."""
        with contextlib.suppress(NotFoundError, msgspec.MsgspecError):
            data = self._store.get(self._key(number), max_bytes=_RECORD_BYTES)
            if blake3.blake3(data[32:]).digest() == data[:32]:
                packed: PackedUnit = decode_packed(data[32:])
                return packed
        return None

    def records(self, count: int) -> Iterator[PackedUnit]:
        """Yield the records of all units in order. A missing or damaged record raises `CorruptionError`."""
        for number in range(count):
            packed = self.read(number)
            if packed is None:
                raise CorruptionError(
                    f"{self._key(number)} is missing or damaged", hint="pack again; it continues from here"
                )
            yield packed

    def delete(self) -> None:
        """Delete all records of this pack."""
        self._store.delete_many([info.key for info in self._store.list(self._prefix)])

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:08}.unit"
