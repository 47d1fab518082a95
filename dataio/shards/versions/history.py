"""Lists, reads and makes the versions of a dataset in a store.

Invariants:

* A version exists if and only if its document exists.
* A writer stores the document last, after everything that the document names. It uses `put_if_absent` with a nonce, so
  exactly one of several concurrent writers makes the version.
* A writer takes the number after the highest existing number, so gaps between numbers are never filled later.
* `commit` makes every version after the first. A writer that loses a race builds its version again from the newest
  version, a bounded number of times.

Failure behaviour: `NotFoundError` lists the versions that exist. `ConflictError` describes the version that won a race.
"""

from __future__ import annotations

import random
import re
import secrets
import time
import urllib.parse
from collections.abc import Callable

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import ConflictError, NotFoundError, UsageError
from headrace.dataio.shards.index.pages import digest
from headrace.dataio.shards.versions.documents import (
    DATASET_KEY,
    FORMAT,
    DatasetDocument,
    VersionDocument,
    decode,
    encode,
    encode_version,
    version_key,
)
from headrace.dataio.store.base import Store

CHECKPOINTS_KEY = "repo.json"
"""The object that marks a checkpoint repository. A store holds either a dataset or a checkpoint repository."""
COMMIT_TRIES = 64
"""The number of lost races after which `commit` fails."""
_VERSION_KEY = re.compile(r"versions/(\d{8})\.json")


def list_versions(store: Store) -> list[int]:
    """Return the numbers of the existing versions, in ascending order."""
    matches = (_VERSION_KEY.fullmatch(info.key) for info in store.list("versions/"))
    return sorted(int(match[1]) for match in matches if match)


def name_of(store: Store) -> str:
    """Return the default name of a dataset: the last segment of its URL, percent-decoded."""
    return urllib.parse.unquote(store.location.url.rstrip("/").rpartition("/")[2]) or "dataset"


def claim(store: Store, name: str) -> None:
    """Write `dataset.json` unless it exists. This alone does not make a dataset visible."""
    store.put_if_absent(DATASET_KEY, encode(DatasetDocument(format=FORMAT, name=name, nonce=secrets.token_hex(16))))


def refuse_existing(store: Store, hint: str) -> None:
    """Raise `ConflictError` if the store already holds a dataset, and `UsageError` if it holds checkpoints."""
    existing = list_versions(store)
    if existing:
        raise ConflictError(f"{store.location.url} already holds a dataset (version {existing[-1]})", hint=hint)
    refuse_checkpoints(store)


def refuse_checkpoints(store: Store) -> None:
    """Raise `UsageError` if a new dataset would be mixed with a checkpoint repository."""
    if store.exists(CHECKPOINTS_KEY) and not store.exists(DATASET_KEY):
        raise UsageError(
            f"{store.location.url} holds checkpoints, so no dataset is made there",
            hint="give an empty folder or prefix",
        )


def _no_dataset(store: Store) -> NotFoundError:
    url = store.location.url
    if store.exists(CHECKPOINTS_KEY):
        return NotFoundError(
            f"there is no dataset at {url}, but a checkpoint repository",
            hint="give the dataset's address; `headrace ckpt ls` lists checkpoints",
        )
    return NotFoundError(f"there is no dataset at {url}", hint="check the address, or make one with `headrace pack`")


def publish(store: Store, document: VersionDocument) -> None:
    """Store the document, which makes the version exist. Raises `ConflictError` if another writer made this version."""
    if not store.put_if_absent(version_key(document.version), encode_version(store, document)):
        winner, _ = load(store, document.version)
        raise ConflictError(
            f"{store.location.url}: another writer made version {document.version}, "
            f"{winner.samples} samples at {winner.created}",
            hint="open that version, or pack to another URL",
        )


def commit(store: Store, build: Callable[[VersionDocument], VersionDocument], *, trunk: bool = True) -> VersionDocument:
    """Make the next version of a dataset and return its document.

    `build` receives the document of the newest version that is not a saved view, and returns the next document. It must
    store everything that the new document names before it returns. `commit` sets the number, the nonce and the trunk.

    If another writer takes the number first, `commit` calls `build` again with the newest document. `build` may raise
    `UsageError` or `ConflictError`. In the first call, the error passes through. After a lost race, `commit` raises a
    `ConflictError` that describes the winner. With `trunk=False`, readers do not open the new version by default.

    Raises `NotFoundError` if there is no dataset, and `ConflictError` after `COMMIT_TRIES` lost races.
    """
    for attempt in range(COMMIT_TRIES):
        newest, _ = load(store, _newest(store))
        base = newest if newest.trunk == newest.version else load(store, newest.trunk)[0]
        try:
            built = build(base)
        except (UsageError, ConflictError) as error:
            if not attempt:
                raise
            raise ConflictError(f"{_describe_winner(store, newest)}: {error.message}", hint=error.hint) from error
        number = newest.version + 1
        document = msgspec.structs.replace(
            built, version=number, trunk=number if trunk else newest.trunk, nonce=secrets.token_hex(16)
        )
        if store.put_if_absent(version_key(number), encode_version(store, document)):
            return document
        time.sleep(random.uniform(0, 0.01 * min(attempt + 1, 20)))
    winner, _ = load(store, _newest(store))
    raise ConflictError(
        f"{_describe_winner(store, winner)}, and {COMMIT_TRIES} attempts lost the race against other writers",
        hint="try again",
    )


def _describe_winner(store: Store, winner: VersionDocument) -> str:
    message = f" ({winner.message})" if winner.message else ""
    return f"{store.location.url}: another writer made version {winner.version}{message} at {winner.created}"


def _newest(store: Store) -> int:
    newest = max(list_versions(store), default=None)
    if newest is None:
        raise _no_dataset(store)
    return newest


def load(store: Store, version: int | None = None) -> tuple[VersionDocument, str]:
    """Read the document of `version`, and return it with the BLAKE3 of its bytes.

    None means the newest version that is not a saved view.
    """
    if version is not None:
        return _load(store, version)
    document, document_digest = _load(store, _newest(store))
    return (document, document_digest) if document.trunk == document.version else _load(store, document.trunk)


def _load(store: Store, version: int) -> tuple[VersionDocument, str]:
    url = store.location.url
    try:
        data = store.get(version_key(version), max_bytes=limits.JSON_DOCUMENT_BYTES)
    except NotFoundError as error:
        existing = list_versions(store)
        if not existing:
            raise _no_dataset(store) from error
        raise NotFoundError(
            f"{url} has no version {version}", hint=f"it has {', '.join(map(str, existing[-20:]))}"
        ) from error
    return decode(data, version, f"{url}: {version_key(version)}", store), digest(data)
