"""What an unfinished pack has done so far, kept in the destination until the version exists.

```
packing/<plan>/begun                      the version that the pack builds on (0: none)      put_if_absent
packing/<plan>/<number>.unit              a unit that is packed: its shards and rows         BLAKE3, then msgpack
```

Invariants: a unit's record is written after its shards are stored, so what a record names is there. Records are immutable and
depend on the plan alone: two packers of one plan write the same. Nothing that readers see refers to this folder.
Failure behaviour: a damaged record counts as absent, and its unit is packed again; the folder of a pack that is never resumed can
be deleted by hand.
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
from headrace.dataio.shards.contract import Sample
from headrace.dataio.shards.media.facts import decode_other, encode_other
from headrace.dataio.shards.report import Skipped
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store

_RECORD_BYTES = 512 * limits.MIB
_NAME = re.compile(r"(\d{8})\.unit")


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """One unit as it was packed. The samples' numbers begin at 0. `files` and `bytes` are those of the input that was used."""

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
    """The records of the plan `plan` in `store`."""

    def __init__(self, store: Store, plan: str) -> None:
        self.plan = plan
        self._store, self._prefix = store, f"packing/{plan}/"

    def begin(self, base: int) -> int:
        """The version that the pack builds on: `base`, or what an earlier start of the same pack had said."""
        key = f"{self._prefix}begun"
        mine = msgspec.json.encode(_Begun(base, secrets.token_hex(16)))
        if self._store.put_if_absent(key, mine):
            return base
        try:
            return msgspec.json.decode(self._store.get(key), type=_Begun).base
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptionError(f"{key} is damaged", hint="delete the folder packing/ and pack again") from error

    def done(self) -> set[int]:
        """The units that have a record."""
        matches = (_NAME.fullmatch(info.key.removeprefix(self._prefix)) for info in self._store.list(self._prefix))
        return {int(match[1]) for match in matches if match}

    def seal(self, number: int, packed: Packed) -> None:
        """Record that a unit is packed."""
        body = encode_packed(packed)
        if len(body) > _RECORD_BYTES - 32:
            raise CapacityError("the index rows of one shard are too large", hint="pack into smaller shards")
        self._store.put(self._key(number), blake3.blake3(body).digest() + body)

    def read(self, number: int) -> Packed | None:
        """The record of a unit; None when there is none, or a damaged one."""
        with contextlib.suppress(NotFoundError, msgspec.MsgspecError):
            data = self._store.get(self._key(number), max_bytes=_RECORD_BYTES)
            if blake3.blake3(data[32:]).digest() == data[:32]:
                packed: Packed = decode_packed(data[32:])
                return packed
        return None

    def records(self, count: int) -> Iterator[Packed]:
        """All units in order; `CorruptionError` when one is not there."""
        for number in range(count):
            packed = self.read(number)
            if packed is None:
                raise CorruptionError(
                    f"{self._key(number)} is missing or damaged", hint="pack again; it goes on from here"
                )
            yield packed

    def delete(self) -> None:
        """Remove everything of this pack."""
        self._store.delete_many([info.key for info in self._store.list(self._prefix)])

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:08}.unit"
