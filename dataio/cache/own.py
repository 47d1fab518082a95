"""How a process reads shards by itself, where no sidecar serves it.

Purpose: files of this machine are read where they lie; objects of a network file system or of S3 go through a cache
in the process, but for what is wanted first.
Invariant: the bytes are the same.
Failure behaviour: that of the readers.
"""

from __future__ import annotations

from headrace.dataio.cache.contract import ShardReader
from headrace.dataio.store.base import Store


def own_reader(store: Store) -> ShardReader:
    """A reader of `store` for this process alone. Each of the two is imported where it is needed."""
    if not _has_files(store):
        from headrace.dataio.cache.headstart import HeadStart

        return HeadStart(store, _cached)
    from headrace.dataio.cache.local import DirectReader

    return DirectReader(store, lambda: _cached(store))


def _cached(store: Store) -> ShardReader:
    from headrace.dataio.cache.reader import PrivateReader

    return PrivateReader(store)


def _has_files(store: Store) -> bool:
    """Whether some of its objects may be files: it is a directory, or one is mounted in it."""
    location = store.location
    mounted = location.options.get("mounts")
    urls = (
        [location.url, *(str(one.get("url")) for one in mounted.values())]
        if isinstance(mounted, dict)
        else [location.url]
    )
    return any(url.startswith("file:") for url in urls)
