"""Damage in every kind of object of a repository: a flipped bit, a truncation, an extension, an exchange.

Each damage is found, or has no effect. Damaged bytes are never returned as a state. A collection deletes nothing that it
would keep in an intact repository.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from headrace.checkpoint.format import description, manifest, names
from headrace.checkpoint.format.documents import (
    Base,
    PendingDelete,
    Policy,
    StepName,
    StepOfRun,
    Timeline,
    decode,
    encode,
    this_process,
)
from headrace.checkpoint.repository import check, collect, tags, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError
from headrace.dataio.core.limits import JSON_DOCUMENT_BYTES
from headrace.dataio.store.base import Store
from headrace.dataio.testing.faulty_stores import Fault, Faulty, Rule
from tests.support.checkpoint_states import RUN, Wrapped, begin, load, make, save
from tests.support.stepping import MemoryStore

STATES = {step: {"frozen": bytes(70_000), "weights": random.Random(step).randbytes(70_001)} for step in (1, 2, 3)}


def repository_with_everything() -> tuple[MemoryStore, list[Base]]:
    """Three steps that reference each other, a tag, a reader's lease, a collector's record, a tombstone."""
    store = MemoryStore()
    number, found = begin(store), list[Base]()
    for step in (1, 2, 3):
        made = make(
            store,
            STATES[step],
            step=step,
            number=number,
            bases=tuple(found[-1:]),
            metadata={"loss": 1 / step, "nan": float("nan")},
            description=description.name_of(DESCRIPTION),
            description_data=DESCRIPTION,
        )
        found.append(save(store, made))
    tags.tag(store, "best", RUN, 2)
    removed = save(store, make(store, STATES[1], step=9, number=number))
    begin(store, found[2])
    collect.collect(store, [StepOfRun(RUN, number, removed.step)])
    LeaseKeeper(store, "0" * 26, run=RUN, timeline=1, step=3, bases=[found[2]])._write()
    record = PendingDelete(steps=(StepOfRun(RUN, 1, 1),), policy=Policy(last=2))
    store.put("gc/00000000000000000000000000.json", encode(record))
    return store, found


DESCRIPTION = description.encode({"config": {"lr": 1e-3}})
KINDS = [
    "descriptions/",
    "repo.json",
    "timelines/",
    "COMMIT",
    "/fate",
    ".manifest",
    "packs/",
    "leases/",
    "gc/",
    "tags/",
]


def damages(data: bytes, chance: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    for _ in range(count):
        at, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        yield f"cut at {at}", data[:at]
        yield f"a hole at {at}", data[:at] + bytes(min(16, len(data) - at)) + data[at + 16 :]
    yield "an extension", data + b"\0"
    yield "empty", b""


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_damaged_is_found_or_harmless_and_never_returned(kind: str) -> None:
    sound, bases = repository_with_everything()
    keys = [key for key in sound.objects if kind in key]
    assert keys
    chance, refused = random.Random(kind), 0
    for key in keys:
        for what, data in damages(sound.objects[key][0], chance, 6):
            store = MemoryStore()
            store.objects = {**sound.objects, key: (data, sound.objects[key][1])}
            refused += not restores(store, bases, f"{key}: {what}")
            collects(store, sound, bases, f"{key}: {what}")
    assert refused or kind in ("leases/", "tags/", "descriptions/")  # which no restore reads


@pytest.mark.parametrize("kind", ["repo.json", "timelines/", "COMMIT", "/fate", ".manifest", "packs/", "tags/"])
def test_what_one_flipped_bit_on_the_way_damaged_is_read_again(kind: str) -> None:
    sound, bases = repository_with_everything()
    for seed in range(8):  # of a document the flipped byte may be that of its version
        store = Faulty(sound, [Rule(Fault.FLIP_BIT, key=kind, times=1)], seed=seed)
        assert repository.find(store, RUN, "latest") == bases[-1]
        assert tags.find(store, "best").step == 2
        assert load(store, bases[1]) == STATES[2]
        assert repository.read_repo(store) is not None
        assert store.fired == {Fault.FLIP_BIT: 1}


class DamagedAtFirst(Wrapped):
    """One bit of `repo.json` is wrong in the first `times` reads. It is not in the digest at the end."""

    def __init__(self, inner: Store, times: int) -> None:
        super().__init__(inner)
        self.times, self.fired = times, 0

    def get(self, key: str, *, max_bytes: int = JSON_DOCUMENT_BYTES) -> bytes:
        data = bytearray(super().get(key, max_bytes=max_bytes))
        if key == names.REPO and self.fired < self.times:
            self.fired += 1
            data[data.index(b'"created": ') + 11] ^= 1
        return bytes(data)


def test_a_document_that_is_damaged_three_times_on_the_way_is_an_error_and_twice_is_not() -> None:
    sound, _ = repository_with_everything()
    store = DamagedAtFirst(sound, 2)
    assert repository.read_repo(store) == repository.read_repo(sound)
    assert store.fired == 2
    store = DamagedAtFirst(sound, 3)
    with pytest.raises(CorruptionError):
        repository.read_repo(store)
    assert store.fired == 3


def restores(store: MemoryStore, bases: list[Base], what: str) -> bool:
    """Whether all steps were found and restored. The restored values must be correct."""
    whole = True
    for ask in ("latest", 2, "tag:best"):
        try:
            found = repository.find(store, RUN, ask)
            assert found in bases, what
            assert load(store, found) == STATES[found.step], what
            whole &= ask != "latest" or found == bases[2]
        except (CorruptionError, UnsupportedError):
            whole = False
        except NotFoundError as error:
            if "removed" not in error.message:  # by the collector whose record there is
                raise AssertionError(what) from error
            whole = False
    return whole


def collects(store: MemoryStore, sound: MemoryStore, bases: list[Base], what: str) -> None:
    """A collection says that it cannot, or keeps every object that the two newest steps need."""
    try:
        collect.retain(store, RUN, Keep(last=2))
        collect.collect(store, ())
    except (CorruptionError, UnsupportedError):
        pass
    for base in bases[1:]:
        key = names.manifest(RUN, base.timeline, base.step, base.attempt, 0)
        needed = {key, *(pack.key for pack in manifest.decode(sound.objects[key][0], key).packs)}
        assert needed <= set(store.objects), what


def test_a_missing_object_of_any_kind_is_found() -> None:
    sound, bases = repository_with_everything()
    for key in sound.objects:
        if any(kind in key for kind in ("gc/", "leases/", "tags/")):  # these come and go
            continue
        store = MemoryStore()
        store.objects = {name: value for name, value in sound.objects.items() if name != key}
        restores(store, bases, f"{key} is missing")


class WithEmptyFolders(MemoryStore):
    """Lists folders whose objects were deleted, as file systems and some S3 servers do."""

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        yield from super().list_folders(prefix, after=after)
        if prefix == names.timeline_steps(RUN, 1):
            yield "0000000001"


def test_folders_of_a_run_that_was_removed_are_no_lost_timeline() -> None:
    store = WithEmptyFolders()
    assert list(store.list_folders(names.timeline_steps(RUN, 1)))
    assert timeline.open_timeline(store, RUN, None) == 1


def test_a_lost_newest_timeline_is_found_by_whoever_looks_for_the_latest_or_starts() -> None:
    store, bases = repository_with_everything()  # its timeline 2 has no step, so nothing is lost with it
    after = save(store, make(store, STATES[1], step=4, number=2, bases=(bases[2],)))
    tags.tag(store, "newest", RUN, 4)
    document = store.objects.pop(names.timeline(RUN, 2))
    for look in (lambda: repository.find(store, RUN, "latest"), lambda: repository.find(store, RUN, 3)):
        with pytest.raises(CorruptionError, match=r"000002.json is missing, but the timeline has steps"):
            look()
    with pytest.raises(CorruptionError, match="restore the object from a backup"):
        timeline.open_timeline(
            store, RUN, StepName(1, 3)
        )  # would take the number again, with the lost one's steps in it
    before = dict(store.objects)
    with pytest.raises(CorruptionError):
        collect.retain(store, RUN, Keep(last=1))
    assert store.objects == before
    assert repository.find(store, RUN, "tag:newest") == after
    assert (names.timeline(RUN, 2), (f"{RUN}/2/4",)) in [(p.object, p.hits) for p in check.check(store).problems]
    store.objects[names.timeline(RUN, 2)] = document
    assert repository.find(store, RUN, "latest") == after
    assert check.check(store).clean


def test_a_lost_timeline_in_the_middle_is_reported_where_no_branch_needs_it() -> None:
    store = MemoryStore()
    for number in (1, 2, 3):
        save(store, make(store, STATES[1], step=number, number=begin(store)))  # each starts anew
    del store.objects[names.timeline(RUN, 2)]
    assert repository.find(store, RUN, "latest") is not None
    assert [(p.object, p.hits) for p in check.check(store).problems] == [(names.timeline(RUN, 2), (f"{RUN}/2/2",))]
    assert timeline.open_timeline(store, RUN, None) == 4


def test_a_timeline_that_is_opened_while_somebody_looks_is_not_taken_for_a_lost_one() -> None:
    store = MemoryStore()
    save(store, make(store, STATES[1], step=1, number=begin(store)))
    made: list[int] = []

    def opened_meanwhile(operation: str, key: str) -> None:
        if (operation, key) == ("list", names.timeline_steps(RUN, 2)) and not made:
            made.append(2)
            assert begin(store, Base(1, 1, "")) == 2
            save(store, make(store, STATES[2], step=2, number=2))

    store.before = opened_meanwhile
    found = repository.find(store, RUN, "latest")
    assert made
    assert found is not None
    assert found.step in (1, 2)  # either was the latest while the search ran
    later = repository.find(store, RUN, "latest")
    assert later is not None
    assert later.step == 2


def test_objects_that_changed_places_are_found() -> None:
    """Sound in themselves, but another's."""
    sound, bases = repository_with_everything()
    for kind in ("/fate", ".manifest", "COMMIT", "packs/"):
        keys = [key for key in sound.objects if kind in key]
        for key, other in zip(keys, keys[1:] + keys[:1], strict=True):
            store = MemoryStore()
            store.objects = {**sound.objects, key: sound.objects[other]}
            restores(store, bases, f"{key} is {other}")


@pytest.mark.parametrize("kind", ["repo.json", "timelines/", "COMMIT", "/fate", ".manifest"])
def test_every_kind_of_document_of_a_newer_format_asks_for_a_newer_headrace(kind: str) -> None:
    store, _ = repository_with_everything()
    for key in [key for key in store.objects if kind in key]:
        data = b'{"version": 7}' if kind != ".manifest" else b"\x81\xa7version\x07"
        store.objects[key] = data, 0.0
    if kind in ("repo.json", "timelines/"):
        with pytest.raises(
            UnsupportedError, match=r"format version 7; this Headrace reads version 1 \(install a newer"
        ):
            repository.find(store, RUN, "latest")
        return
    report = check.check(store)
    assert not report.clean
    assert all("format version 7" in problem.what for problem in report.problems) or kind == ".manifest"


def test_a_document_that_was_edited_is_refused_and_one_without_a_digest_is_read() -> None:
    made = Timeline(run=RUN, timeline=1, parent=None, created=1.0, process=this_process())
    data = encode(made)
    assert decode(data, Timeline, "t") == made
    with pytest.raises(CorruptionError, match="t is damaged: its BLAKE3 digest does not match"):
        decode(data.replace(b'"timeline": 1', b'"timeline": 2'), Timeline, "t")
    plain = data[: data.index(b',\n "digest"')] + b"\n}\n"
    assert decode(plain, Timeline, "t") == made


def test_a_check_reports_how_much_it_has_read_of_how_much() -> None:
    store, _ = repository_with_everything()
    seen = list[check.CheckProgress]()
    report = check.check(store, progress=seen.append)
    assert [done.bytes for done in seen] == sorted(done.bytes for done in seen)
    assert (seen[-1].bytes, seen[-1].bytes_total) == (report.bytes_read, report.bytes_read)
    assert {done.steps for done in seen} == {3}
