"""The journal of a run: the records of its finished units, so that an interrupted run continues where it stopped.

Purpose: `pack`, `index`, `verify` and the statistics of `info` divide their work into numbered units
(`headrace.dataio.shards.units.engine`). A journal holds one record for each finished unit, below one folder of a store:

```
<folder>/begun                            the version that the run builds on (0: none)       put_if_absent
<folder>/<number>.unit                    the record of a unit                               BLAKE3, then msgpack
```

Invariants:

* The name of the folder holds a digest of the plan: the inputs, the settings and the library versions. Another plan
  therefore never finds these records.
* Records are immutable and depend only on the plan. Two processes that run the same plan write the same records.
* A record is at most `RECORD_BYTES` long, and a plan has at most about `MAX_UNITS` units (`divide`).
* Readers of a dataset never use a journal.

Failure behaviour: a damaged record counts as absent, so its unit runs again. A record that is too large raises
`CapacityError`. You can delete the folder of a run that will never be resumed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, NotFoundError
from headrace.dataio.shards.media.messages import dec_hook, enc_hook
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

RECORD_BYTES = 512 * limits.MIB
"""The largest record of a unit."""
MAX_UNITS = 100_000
"""`divide` makes at most about this many units, however many items there are."""
_NAME = re.compile(r"(\d{8})\.unit")


class Done(NamedTuple):
    """Finished work: inputs (groups of files, shards or index parts), their bytes, samples, and skipped inputs."""

    items: int = 0
    bytes: int = 0
    samples: int = 0
    skipped: int = 0

    def plus(self, other: Done) -> Done:
        """Return the sum."""
        return Done(*(a + b for a, b in zip(self, other, strict=True)))


class Unit(msgspec.Struct, frozen=True):
    """A part of the work of a plan. `number` is its number in the plan."""

    number: int


class Record(msgspec.Struct, frozen=True):
    """The record of a finished unit."""

    @property
    def done(self) -> Done:
        """The work of the unit."""
        return Done()


R = TypeVar("R", bound=Record)


def divide(sizes: Sequence[int], *, unit_bytes: int, unit_items: int) -> Iterator[range]:
    """Divide items into runs of adjacent items, one run for each unit.

    Args:
        sizes (Sequence[int]): The sizes of the items in bytes.
        unit_bytes (int): The items of a unit have at most this many bytes in all, unless it has only one item.
        unit_items (int): A unit has at most this many items.

    Both limits grow with the number and the sizes of the items, so that there are at most about `MAX_UNITS` units.

    Example:
        >>> list(divide([5, 5, 20, 1], unit_bytes=10, unit_items=8))
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    most_bytes = max(unit_bytes, 2 * sum(sizes) // MAX_UNITS)
    most_items = max(unit_items, -(-2 * len(sizes) // MAX_UNITS))
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and (total + size > most_bytes or number - start >= most_items):
            yield range(start, number)
            start, total = number, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


class Journal(ABC, Generic[R]):
    """The records of one run, by the numbers of their units."""

    @abstractmethod
    def done(self) -> set[int]:
        """Return the numbers of the units that have a record."""

    @abstractmethod
    def write(self, number: int, record: R) -> None:
        """Write the record of a unit."""

    @abstractmethod
    def read(self, number: int) -> R | None:
        """Return the record of a unit, or None if the record is missing or damaged."""

    @abstractmethod
    def delete(self) -> None:
        """Delete all records of this run."""

    def records(self, count: int, first: int = 0) -> Iterator[R]:
        """Yield the records of `count` units in order. A missing or damaged record raises `CorruptionError`."""
        for number in range(first, first + count):
            record = self.read(number)
            if record is None:
                raise CorruptionError(
                    f"the record of unit {number} is missing or damaged",
                    hint="run the same command again; it continues from here",
                )
            yield record


class StoredJournal(Journal[R]):
    """A journal in the folder `folder` of `store`, which outlives the process. `record` is the type of its records."""

    def __init__(self, store: Store, folder: str, record: type[R]) -> None:
        self.store, self.folder, self.record_type = store, folder, record
        self._encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
        self._decode = msgspec.msgpack.Decoder(record, dec_hook=dec_hook).decode

    def begin(self, base: int) -> int:
        """Return the version that the run builds on.

        This is `base`, unless an earlier start of the same run recorded another version.
        """
        key = f"{self.folder}/begun"
        start = msgspec.json.encode(_Start(base, secrets.token_hex(16)))
        if self.store.put_if_absent(key, start):
            return base
        try:
            return msgspec.json.decode(self.store.get(key), type=_Start).base
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptionError(
                f"{key} is damaged", hint=f"delete the folder {self.folder} and start again"
            ) from error

    def done(self) -> set[int]:
        prefix = f"{self.folder}/"
        matches = (_NAME.fullmatch(info.key.removeprefix(prefix)) for info in self.store.list(prefix))
        return {int(match[1]) for match in matches if match}

    def write(self, number: int, record: R) -> None:
        body = self._encode(record)
        if len(body) > RECORD_BYTES - 32:
            raise CapacityError(
                f"the record of unit {number} would be larger than {limits.format_bytes(RECORD_BYTES)}",
                hint="use smaller shards",
            )
        self.store.put(self._key(number), blake3.blake3(body).digest() + body)

    def read(self, number: int) -> R | None:
        with contextlib.suppress(NotFoundError, msgspec.MsgspecError):
            data = self.store.get(self._key(number), max_bytes=RECORD_BYTES)
            if blake3.blake3(data[32:]).digest() == data[:32]:
                record: R = self._decode(data[32:])
                return record
        return None

    def delete(self) -> None:
        self.store.delete_many([info.key for info in self.store.list(f"{self.folder}/")])

    def _key(self, number: int) -> str:
        return f"{self.folder}/{number:08}.unit"


class MemoryJournal(Journal[R]):
    """A journal for a run that nothing resumes. The records end with the process."""

    def __init__(self) -> None:
        self._records: dict[int, R] = {}
        self._lock = threading.Lock()

    def done(self) -> set[int]:
        with self._lock:
            return set(self._records)

    def write(self, number: int, record: R) -> None:
        with self._lock:
            self._records[number] = record

    def read(self, number: int) -> R | None:
        return self._records.get(number)

    def delete(self) -> None:
        self._records.clear()


class JournalFolder:
    """The place for the journals of a run that has no store of its own for them. It is a context manager.

    Args:
        url: A folder or URL, or an open store. None keeps the records in memory.
    """

    def __init__(self, url: str | os.PathLike[str] | Store | None) -> None:
        self._owned = url is not None and not isinstance(url, Store)
        self._store = url if url is None or isinstance(url, Store) else open_store(url)
        self._opened = list[Journal[Any]]()

    def open(self, name: str, record: type[R]) -> Journal[R]:
        """Return the journal `units/<name>`."""
        journal = MemoryJournal[R]() if self._store is None else StoredJournal(self._store, f"units/{name}", record)
        self._opened.append(journal)
        return journal

    def delete(self) -> None:
        """Delete the journals that `open` returned."""
        for journal in self._opened:
            journal.delete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned and self._store is not None:
            self._store.close()


class _Start(msgspec.Struct, frozen=True):
    base: int
    nonce: str
