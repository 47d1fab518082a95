"""The journal records the finished units of a pack. It stays in the destination until the version exists.

```
packing/<plan>/begun                      the version that the pack builds on (0: none)      put_if_absent
packing/<plan>/<number>.unit              a packed unit: its shards and rows                 BLAKE3, then msgpack
```

Invariants:

* The packer writes a unit's record after it has stored the unit's shards. Every shard that a record names therefore
  exists.
* Records are immutable and depend only on the plan. Two packers of one plan write the same records.
* Nothing that readers use refers to this folder.

Failure behaviour: a damaged record counts as absent, and the packer packs its unit again. You can delete by hand the
folder of a pack that will never be resumed.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, NotFoundError
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.media.facts import decode_other, encode_other
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store

_RECORD_BYTES = 512 * limits.MIB
_NAME = re.compile(r"(\d{8})\.unit")


class Packed(msgspec.Struct, frozen=True, kw_only=True):
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


class _Begun(msgspec.Struct, frozen=True):
    base: int
    nonce: str


encode_packed = msgspec.msgpack.Encoder(enc_hook=encode_other).encode
decode_packed = msgspec.msgpack.Decoder(Packed, dec_hook=decode_other).decode


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
        mine = msgspec.json.encode(_Begun(base, secrets.token_hex(16)))
        if self._store.put_if_absent(key, mine):
            return base
        try:
            return msgspec.json.decode(self._store.get(key), type=_Begun).base
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptionError(f"{key} is damaged", hint="delete the folder packing/ and pack again") from error

    def done(self) -> set[int]:
        """Return the numbers of the units that have a record."""
        matches = (_NAME.fullmatch(info.key.removeprefix(self._prefix)) for info in self._store.list(self._prefix))
        return {int(match[1]) for match in matches if match}

    def seal(self, number: int, packed: Packed) -> None:
        """Write the record of a packed unit."""
        body = encode_packed(packed)
        if len(body) > _RECORD_BYTES - 32:
            raise CapacityError("the index rows of one shard are too large", hint="pack into smaller shards")
        self._store.put(self._key(number), blake3.blake3(body).digest() + body)

    def read(self, number: int) -> Packed | None:
        """Return the record of a unit, or None if the record is missing or damaged."""
        with contextlib.suppress(NotFoundError, msgspec.MsgspecError):
            data = self._store.get(self._key(number), max_bytes=_RECORD_BYTES)
            if blake3.blake3(data[32:]).digest() == data[:32]:
                packed: Packed = decode_packed(data[32:])
                return packed
        return None

    def records(self, count: int) -> Iterator[Packed]:
        """Yield the records of all units in order. A missing or damaged record raises `CorruptionError`."""
        for number in range(count):
            packed = self.read(number)
            if packed is None:
                raise CorruptionError(
                    f"{self._key(number)} is missing or damaged", hint="pack again; it goes on from here"
                )
            yield packed

    def delete(self) -> None:
        """Delete all records of this pack."""
        self._store.delete_many([info.key for info in self._store.list(self._prefix)])

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:08}.unit"
