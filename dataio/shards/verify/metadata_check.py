"""Verifies the documents and the index of a dataset, and finds objects that no version names.

Invariants: the documents of all versions are checked, since tags and lineage refer to them. Index parts are checked
only for the version that `verify` was called for. With a copy, a damaged object is replaced and checked again
immediately, so that the objects that it names can be checked.
Failure behaviour: damage is a finding. Transient errors are raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, NotFoundError, UnsupportedError
from headrace.dataio.shards.query.open_index import load_bitmap
from headrace.dataio.shards.readahead import ReadAhead
from headrace.dataio.shards.verify.repair import (
    NotRepairable,
    bitmaps_by_object,
    repair_bitmaps,
    repair_document,
    repair_page,
    repair_part,
)
from headrace.dataio.shards.verify.report import Finding, ObjectReport, report
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history, tags
from headrace.dataio.shards.versions.documents import IndexPart, VersionDocument
from headrace.dataio.shards.versions.paging import Page, PagedList, check_page
from headrace.dataio.store.base import Store
from headrace.dataio.store.joined import FILES_FOLDER, LIST_FOLDER, SHARD_PREFIX
from headrace.dataio.store.mounts import PREFIX, Mounts

Check = Callable[[bytes, str], object]

_DATA_FOLDERS = ("shards/", "index/", LIST_FOLDER)
"""The folders whose objects readers find only through version documents."""
_VERSION_KEY = re.compile(r"versions/(\d{8})\.json")


def with_repair(object_report: ObjectReport, repaired: bool, unrepaired: str) -> ObjectReport:
    """Return a copy of the report with the result of the repair."""
    return msgspec.structs.replace(object_report, repaired=repaired, unrepaired=unrepaired)


def check_documents(store: Store, copy: Store | None) -> list[ObjectReport]:
    """Check `dataset.json` and the documents of all versions and tags, each against its own digest."""
    keys = {info.key for prefix in ("versions/", "tags/") for info in store.list(prefix)}
    if copy is not None:
        keys |= {info.key for prefix in ("versions/", "tags/") for info in copy.list(prefix)}
    numbers = [int(match[1]) for match in map(_VERSION_KEY.fullmatch, keys) if match]
    if not numbers:
        raise NotFoundError(f"there is no dataset at {store.location.url}", hint="check the address")
    document_keys = [versions.DATASET_KEY, *(versions.version_key(n) for n in range(1, max(numbers) + 1))]
    document_keys += sorted(key for key in keys if key.startswith("tags/"))
    return [_check_document(store, copy, key) for key in document_keys]


def _check_document(store: Store, copy: Store | None, key: str) -> ObjectReport:
    check = _document_check(store, key)
    size, findings = _read_document(store, key, check)
    repaired, unrepaired = False, ""
    if findings and copy is not None:
        try:
            repair_document(store, copy, key, check)
            repaired, (size, findings) = True, _read_document(store, key, check)
        except NotRepairable as error:
            unrepaired = str(error)
    return with_repair(report("document", key, findings, bytes=size), repaired, unrepaired)


def _read_document(store: Store, key: str, check: Check) -> tuple[int, list[Finding]]:
    try:
        data = store.get(key, max_bytes=limits.JSON_DOCUMENT_BYTES)
        check(data, key)
    except NotFoundError:
        return 0, [Finding(code="missing", message="the object does not exist")]
    except (CorruptionError, CapacityError, UnsupportedError) as error:
        return 0, [Finding(code="digest", message=error.message.removeprefix(f"{key} "))]
    return len(data), []


def _document_check(store: Store, key: str) -> Check:
    match = _VERSION_KEY.fullmatch(key)
    if match:
        number = int(match[1])
        return lambda data, name: versions.decode(data, number, name, store)
    return versions.decode_dataset if key == versions.DATASET_KEY else _check_tag


def _check_tag(data: bytes, name: str) -> None:
    versions.check_bytes(data, name)
    try:
        msgspec.json.decode(data, type=tags.Tag)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptionError(f"{name} is not a tag: {error}") from error


def check_pages(store: Store, copy: Store | None, document: VersionDocument) -> list[ObjectReport]:
    """Check the pages of shards and parts. If one cannot be read or repaired, raise `CorruptionError`.

    Without it, there is no list of the objects to check.
    """
    lists = [entries for entries in (document.shards, document.index) if isinstance(entries, PagedList)]
    return [_check_page(store, copy, page) for entries in lists for page in entries.pages]


def _check_page(store: Store, copy: Store | None, page: Page) -> ObjectReport:
    findings, repaired = list[Finding](), False
    try:
        check_page(store, page)
    except CorruptionError as error:
        if copy is None:
            raise
        findings = [Finding(code="digest", message=error.message)]
        repair_page(store, copy, page)
        repaired = True
    return with_repair(report("index", page.key, findings, bytes=page.size), repaired, "")


def check_part(store: Store, copy: Store | None, part: IndexPart) -> ObjectReport:
    """Check the digest of an index part."""
    size, findings = _read_part(store, part)
    repaired, unrepaired = False, ""
    if findings and copy is not None:
        try:
            repair_part(store, copy, part)
            repaired, (size, findings) = True, _read_part(store, part)
        except NotRepairable as error:
            unrepaired = str(error)
    return with_repair(report("index", part.key, findings, bytes=size), repaired, unrepaired)


def _read_part(store: Store, part: IndexPart) -> tuple[int, list[Finding]]:
    try:
        size = store.stat(part.key).size
    except NotFoundError:
        return 0, [Finding(code="missing", message="the object does not exist")]
    if size != part.size:
        return 0, [Finding(code="size", message=f"it has {size} bytes, the version says {part.size}")]
    hasher = blake3.blake3()
    with ReadAhead(store, part.key, size, 4 * limits.MIB) as ahead:
        for piece in ahead.parts(0, size):
            hasher.update(piece)
    if hasher.hexdigest() != part.digest:
        return size, [Finding(code="digest", message="its BLAKE3 digest does not match the version")]
    return size, []


def check_bitmaps(store: Store, copy: Store | None, key: str, document: VersionDocument) -> ObjectReport:
    """Check the bitmaps that the version uses in the object `key`."""
    findings = _read_bitmaps(store, key, document)
    repaired, unrepaired = False, ""
    if findings and copy is not None:
        try:
            repair_bitmaps(store, copy, key, bitmaps_by_object(document.index)[key])
            repaired, findings = True, _read_bitmaps(store, key, document)
        except NotRepairable as error:
            unrepaired = str(error)
    return with_repair(report("index", key, findings), repaired, unrepaired)


def _read_bitmaps(store: Store, key: str, document: VersionDocument) -> list[Finding]:
    findings = []
    for part in document.index:
        if part.bitmap is not None and part.bitmap.key == key:
            try:
                load_bitmap(store, part, part.key)
            except HeadraceError as error:
                if not isinstance(error, CorruptionError):
                    raise
                findings.append(Finding(code="digest", message=error.message, offset=part.bitmap.offset))
    return findings


def find_orphans(store: Store, document: VersionDocument) -> list[str]:
    """Return the shards and index objects that no version names.

    If a version cannot be read, this returns an empty list, because that version may name some of them.
    """
    documents = [document]
    for number in history.list_versions(store):
        if number != document.version:
            try:
                documents.append(history.load(store, number)[0])
            except (CorruptionError, UnsupportedError):
                return []
    referenced, folders = set[str]().union(*map(_referenced_objects, documents)), list(_DATA_FOLDERS)
    joined_shards = {s.key for one in documents for s in one.shards if s.key.startswith(SHARD_PREFIX)}
    referenced |= {f"{LIST_FOLDER}{key[len(SHARD_PREFIX) :]}.json" for key in joined_shards}
    made_files = _made_files(store, joined_shards)
    if made_files is not None:
        referenced |= made_files
        folders.append(FILES_FOLDER)
    return [info.key for prefix in folders for info in store.list(prefix) if info.key not in referenced]


def _made_files(store: Store, joined_shards: set[str]) -> set[str] | None:
    """Return the objects below `files/` that the lists of these shards name. None if a list cannot be read."""
    made = set[str]()
    if not joined_shards:
        return made
    if not isinstance(store, Mounts) or store.joined is None:
        return None
    try:
        for key in joined_shards:
            made.update(one.key for one in store.joined.objects(key[len(SHARD_PREFIX) :]).objects)
    except (CorruptionError, NotFoundError, UnsupportedError):
        return None
    return made


def _referenced_objects(document: VersionDocument) -> set[str]:
    keys = {shard.key for shard in document.shards} | {part.key for part in document.index}
    keys |= {part.bitmap.key for part in document.index if part.bitmap is not None}
    for entries in (document.shards, document.index):
        keys |= {page.key for page in entries.pages} if isinstance(entries, PagedList) else set()
    return {key for key in keys if not key.startswith(PREFIX)}
