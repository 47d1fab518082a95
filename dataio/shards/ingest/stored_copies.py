"""Copies objects of a store to local files, and computes their digests on the way.

Invariants: an object is read once, from beginning to end, with `readahead.ReadAhead`. The digests are those of the
bytes in the copy. The object must keep the size and the time that it had when it was listed.

Failure behaviour: an object that changed raises `TransientError`. A full disk raises `CapacityError`.
"""

from __future__ import annotations

from pathlib import Path

from headrace.dataio.core.errors import CapacityError, TransientError
from headrace.dataio.shards.pieces import Hasher, piece_size
from headrace.dataio.shards.readahead import ReadAhead
from headrace.dataio.store.base import ObjectInfo, Store


def copy_object(store: Store, info: ObjectInfo, path: Path) -> Hasher:
    """Copy the object to a new file at `path`, and return the digests of the file and of its pieces.

    Args:
        store (Store): the store of the object.
        info (ObjectInfo): the object as it was listed.
        path (Path): where the copy goes. The folder exists.

    Raises:
        TransientError: the object is not the one that was listed.
        CapacityError: the disk is full.
    """
    hasher = Hasher(piece_size(info.size))
    try:
        with ReadAhead(store, info.key, info.size) as ahead, path.open("wb", buffering=0) as file:
            for part in ahead.parts(0, info.size):
                hasher.update(part)
                written = 0
                while written < len(part):
                    written += file.write(part[written:])
    except OSError as error:
        raise CapacityError(
            f"{info.key} could not be copied to {path.parent}: {error.strerror or error}",
            hint="TMPDIR names another folder with more space",
        ) from error
    check_unchanged(store, info)
    return hasher


def check_unchanged(store: Store, info: ObjectInfo) -> None:
    """Raise `TransientError` if the object's size or time is not that of `info`.

    Times may differ by a second, because the listing of a bucket gives more digits than a request.
    """
    current = store.stat(info.key)
    if current.size != info.size or abs(current.modified - info.modified) > 1.0:
        url = f"{store.location.url.rstrip('/')}/{info.key}"
        raise TransientError(f"{url} changed while it was read", hint="try again when nothing writes to it")
