"""Withdraws a published name: subscribers see no version any more, and retention may remove its steps.

| | written | a crash after it leaves |
|---|---|---|
| 1 | a record with the next number, which withdraws the name | the name without a version, and objects that nothing needs |
| 2 | tags, tables and updates are deleted | some of them; another withdrawal or the next publisher deletes them |

Invariants:

- The record is written with `put_if_absent`, as those of versions are. So a publisher of the same number gets a
  `ConflictError`, and a late request of an older one changes nothing. The next publisher uses the number after it.
- The newest `KEPT_VERSIONS` records stay. Otherwise a slow publisher could write the record of a number that was deleted:
  it would report a version that no subscriber sees, and one number would name two versions.
- Objects of a publisher that began after the record are kept: those are younger, and their tags have higher numbers.

Failure behaviour: `NotFoundError` if the name has no record. `ConflictError` if a version was published meanwhile. A
subscriber that is reading the version gets `NotFoundError`, and its tensors hold the version before.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.checkpoint.format.documents import this_process
from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.records import Published, Stored, WithdrawnError
from headrace.checkpoint.repository import tag_records
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import ConflictError, CorruptionError
from headrace.dataio.store.base import ObjectInfo, Store

_after_record = declare("unpublish.recorded", "the name is withdrawn, and nothing was deleted yet")


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """What a withdrawal removes.

    Args:
        name: The published name.
        number: The number of the record that withdraws it.
        version: The newest version; None if its record is damaged, or withdraws the name.
        is_withdrawn: Whether the name was withdrawn before, so that only leftovers are deleted.
        objects: The tables, updates and old records to delete.
        tags: The tags to delete. Their steps stay until retention removes them.
    """

    name: str
    number: int
    version: Published | None
    is_withdrawn: bool
    objects: tuple[ObjectInfo, ...]
    tags: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the objects to delete."""
        return sum(info.size for info in self.objects)


def plan(store: Store, name: str) -> Withdrawal:
    """What `withdraw` would remove now.

    Args:
        store: The repository.
        name: The published name.

    Returns:
        The plan.

    Raises:
        NotFoundError: Nothing was published as `name`.
    """
    numbered, others = records.listed(store, name)
    if not numbered:
        raise records.nothing_published(store, name)
    newest, version, is_withdrawn = max(numbered), None, False
    try:
        version = records.read_record(store, name, newest)
    except WithdrawnError:
        is_withdrawn = True
        others = [info for info in others if info.modified < numbered[newest].modified]  # younger ones may be needed
    except CorruptionError:
        pass
    number = newest if is_withdrawn else newest + 1
    objects = [info for at, info in numbered.items() if at <= number - records.KEPT_VERSIONS]
    return Withdrawal(name, number, version, is_withdrawn, (*objects, *others), _tags(store, name, number))


def withdraw(store: Store, name: str, *, clock: Clock = SYSTEM_CLOCK) -> Withdrawal:
    """Withdraw a name.

    Args:
        store: The repository.
        name: The published name.
        clock: The time of the record.

    Returns:
        What was removed.

    Raises:
        NotFoundError: Nothing was published as `name`.
        ConflictError: A version was published meanwhile.
    """
    planned = plan(store, name)
    if not planned.is_withdrawn:
        if not records.write(store, _record(name, planned.number, clock)):
            raise ConflictError(
                f"another process wrote record {planned.number} of {name} first", hint="withdraw the name again"
            )
        _after_record()
    tags = _tags(store, name, planned.number)  # also those of publishers that lost against this record
    store.delete_many([*map(tag_records.key_of, tags), *(info.key for info in planned.objects)])
    return planned


def _tags(store: Store, name: str, number: int) -> tuple[str, ...]:
    """The tags of versions up to this number. No other process moves them."""
    numbers = {tag: records.number_of_tag(name, tag) for tag in tag_records.listed(store)}
    return tuple(tag for tag, of_tag in numbers.items() if of_tag is not None and of_tag <= number)


def _record(name: str, number: int, clock: Clock) -> Published:
    """The record that withdraws the name. It names no step."""
    return Published(
        version=Published.newest,
        name=name,
        number=number,
        run="",
        timeline=0,
        step=0,
        attempt="",
        tag="",
        include=(),
        exclude=(),
        prefix="",
        dtype="",
        bytes=0,
        weights=Stored("", 0, ""),
        update=None,
        parent=0,
        parent_weights="",
        created=clock.time(),
        process=this_process(),
        withdrawn=True,
    )
