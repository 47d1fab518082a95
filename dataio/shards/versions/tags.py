"""Tags: permanent names for versions, and the list of all versions with their tags.

Purpose: users and training runs can write `release-1` instead of a number.
Invariants: a writer creates `tags/<name>.json` with `put_if_absent` and never changes it. A tag holds the digest of the
version's document, so it always refers to the same bytes.
Failure behaviour: a name that another version has raises `ConflictError`. An unknown tag raises `NotFoundError`, which
lists the existing tags. If the version's document differs from the tagged document, `load` raises `CorruptionError`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import ConflictError, CorruptionError, NotFoundError, UsageError
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.documents import VersionDocument
from headrace.dataio.store.base import Store

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,127}")
_KEY = re.compile(rf"tags/({_NAME.pattern})\.json")
MAX_TAGS = 10_000


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """`tags/<name>.json`. `document` is the BLAKE3 of the version's document."""

    format: int
    name: str
    version: int
    document: str
    created: str
    nonce: str


def create(store: Store, name: str, version: int, digest: str) -> None:
    """Tag a version. It is not an error if the version already has this tag."""
    check_name(name)
    tag = Tag(
        format=versions.FORMAT,
        name=name,
        version=version,
        document=digest,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        nonce=secrets.token_hex(16),
    )
    if store.put_if_absent(f"tags/{name}.json", versions.encode(tag)):
        return
    existing = read(store, name)
    if (existing.version, existing.document) != (version, digest):
        raise _tag_conflict(store, existing)


def check_free(store: Store, name: str) -> None:
    """Raise the error that `create` would raise for a version that does not exist yet."""
    check_name(name)
    if name in names(store):
        raise _tag_conflict(store, read(store, name))


def check_name(name: str) -> None:
    """Raise `UsageError` for an invalid tag name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid tag", hint="letters, digits, '.', '_' and '-', not a digit first")


def _tag_conflict(store: Store, existing: Tag) -> ConflictError:
    return ConflictError(
        f"{store.location.url}: the tag {existing.name!r} names version {existing.version} since {existing.created}",
        hint="tags do not move; choose another name",
    )


def read(store: Store, name: str) -> Tag:
    """Read and check the tag `name`."""
    key = f"tags/{name}.json"
    try:
        if not _NAME.fullmatch(name):
            raise NotFoundError(f"{name!r} is not a tag")
        data = store.get(key, max_bytes=limits.MESSAGE_BYTES)
    except NotFoundError as error:
        have = ", ".join(sorted(names(store))[:20]) or "none"
        raise NotFoundError(f"{store.location.url} has no version tagged {name!r}", hint=f"tags: {have}") from error
    versions.check_bytes(data, f"{store.location.url}: {key}")
    try:
        return msgspec.json.decode(data, type=Tag)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{store.location.url}: {key} is not a tag: {error}") from error


def names(store: Store) -> list[str]:
    """Return the names of all tags, up to `MAX_TAGS`."""
    matches = (_KEY.fullmatch(info.key) for _, info in zip(range(MAX_TAGS), store.list("tags/"), strict=False))
    return [match[1] for match in matches if match]


def load(store: Store, version: int | str | None = None) -> tuple[VersionDocument, str]:
    """Like `history.load`, but also accepts a tag. A string of digits is a version number."""
    if not isinstance(version, str):
        return history.load(store, version)
    if version.isdecimal() and len(version) < 20:
        return history.load(store, int(version))
    tag = read(store, version)
    document, digest = history.load(store, tag.version)
    if digest != tag.document:
        raise CorruptionError(
            f"{store.location.url}: version {tag.version} is not the one that was tagged {version!r}",
            hint="its document was replaced; restore it from a copy",
        )
    return document, digest


@dataclass(frozen=True)
class VersionInfo:
    """One version, as `list_described` returns it. `trunk` is False for a saved view, which readers never open by default."""

    version: int
    parent: int | None
    trunk: bool
    message: str
    created: str
    samples: int
    digest: str
    lineage: versions.Lineage | None
    tags: tuple[str, ...]


def list_described(store: Store) -> Iterator[VersionInfo]:
    """Yield the existing versions from the newest to the oldest. Documents are read one at a time."""
    tags_by_version = dict[int, list[str]]()
    for name in names(store):
        tags_by_version.setdefault(read(store, name).version, []).append(name)
    for number in reversed(history.list_versions(store)):
        document, digest = history.load(store, number)
        yield VersionInfo(
            version=number,
            parent=document.parent,
            trunk=document.trunk == number,
            message=document.message,
            created=document.created,
            samples=document.samples,
            digest=digest,
            lineage=document.lineage,
            tags=tuple(tags_by_version.get(number, ())),
        )
