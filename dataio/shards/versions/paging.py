"""Pages of a version document: the lists of shards and of index parts of a dataset with very many of them.

Purpose: a version document of format 1 lists all shards and parts. It has a limit of 16 MiB, and every reader decodes all
of it. A document of format 2 names *pages* of both lists. A page is an object of its own, which is read on demand.

```
index/<digest>.shards   one msgpack array of up to `PAGE_SHARDS` shards, compressed with zstd
index/<digest>.parts    one msgpack array of up to `PAGE_PARTS` index parts, compressed with zstd
```

Invariants:

* The document holds the digest of each page, the first and last key in it, and a `Summary` of all entries. So opening a
  dataset reads no page, and looking up a shard by its key reads one.
* The key of a page is its digest. Versions share the pages that hold the same entries. An append keeps all full pages.
* Pages are stored before the document that names them.
* A page is checked against its digest, and its entries are checked, before a reader gets any of them.
* Readers keep a bounded number of pages of each list. So memory does not grow with the number of shards and parts.

Failure behaviour: a missing or damaged page raises `CorruptionError`, which names the page. A page is never unpacked
beyond `MAX_UNPACKED_BYTES`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import msgspec
import numpy as np
import xxhash
import zstandard

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, NotFoundError
from headrace.dataio.shards.index.pages import digest
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.dataio.shards.versions.documents import IndexPart, Shard

PAGE_SHARDS = 4096
PAGE_PARTS = 256
CACHED_PARTS = 128
"""Pages of parts that a reader keeps, of about 0.4 MB each."""
CACHED_SHARDS = 2
CACHED_SIZES = 256
"""Pages of shards of which a reader keeps the sizes, in about 0.2 MB each."""
MAX_PAGE_BYTES = 8 * limits.MIB
MAX_UNPACKED_BYTES = 32 * limits.MIB


class Entry(Protocol):
    """A shard or an index part."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Entry)


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page of `count` entries. `first` and `last` are the smallest and the largest of their keys."""

    key: str
    size: int
    digest: str
    count: int
    first: str
    last: str

    @property
    def is_consistent(self) -> bool:
        """Whether the values agree with each other."""
        return self.count > 0 and 0 <= self.size <= MAX_PAGE_BYTES and self.first <= self.last


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What readers need of all shards and parts of a version.

    * `shard_bytes`: the total size of the shards.
    * `part_bytes`: the total size of the index parts.
    * `sample_bytes`: the total bytes of the members of all samples.
    * `part_samples`: the number of samples in each part.
    * `fields`, `constant_values`, `files`: as of an `IndexPart`, for all parts together.
    """

    shard_bytes: int
    part_bytes: int
    sample_bytes: int
    part_samples: tuple[int, ...]
    fields: dict[str, str]
    constant_values: dict[str, str] = msgspec.field(name="only")
    files: tuple[str, ...]


def summarize(shards: Sequence[Shard], parts: Sequence[IndexPart]) -> Summary:
    """Compute the summary of these shards and parts."""
    fields, constant, files = dict[str, str](), dict[str, str](), set[str]()
    samples, sample_bytes, part_bytes = list[int](), 0, 0
    for number, part in enumerate(parts):
        samples.append(part.samples)
        sample_bytes += part.sample_bytes
        part_bytes += part.size
        for name, kind in part.fields.items():
            fields[name] = join_types(fields.get(name, kind), kind)
        values = dict(part.constant_values)
        constant = values if not number else {n: v for n, v in constant.items() if values.get(n) == v}
        files = set(part.files) if not number else files & set(part.files)
    return Summary(
        shard_bytes=sum(shard.size for shard in shards),
        part_bytes=part_bytes,
        sample_bytes=sample_bytes,
        part_samples=tuple(samples),
        fields=fields,
        constant_values=constant,
        files=tuple(sorted(files)),
    )


def join_types(one: str, other: str) -> str:
    """Return the type of a promoted field that can hold values of both types."""
    if one == other:
        return one
    return "number" if {one, other} == {"integer", "number"} else "mixed"


class PagedList(Sequence[T], Generic[T]):
    """The entries of some pages, read on demand, and then the entries of `tail`, which no page holds yet.

    Args:
        store: The store of the pages.
        pages: The pages, in order.
        kind: The type of an entry.
        check: Raises `CorruptionError` for an entry that contradicts itself or the document.
        cached: The number of pages to keep.
        tail: More entries, after those of the pages.
    """

    def __init__(
        self,
        store: Store,
        pages: Sequence[Page],
        *,
        kind: type[T],
        check: Callable[[T, str], None],
        cached: int,
        tail: tuple[T, ...] = (),
    ) -> None:
        self.store, self.pages, self.tail = store, tuple(pages), tail
        self._kind, self._check, self._cached = kind, check, cached
        self._decoder = msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]
        self._ends = [0, *accumulate(page.count for page in self.pages)]
        self._page = lru_cache(cached)(self.read_page)

    def __len__(self) -> int:
        return self._ends[-1] + len(self.tail)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        if isinstance(at, slice):
            return tuple(self[n] for n in range(*at.indices(len(self))))
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            raise IndexError(at)
        if number >= self._ends[-1]:
            return self.tail[number - self._ends[-1]]
        page = bisect_right(self._ends, number) - 1
        return self._page(page)[number - self._ends[page]]

    def __iter__(self) -> Iterator[T]:
        for page in range(len(self.pages)):
            yield from self._page(page)
        yield from self.tail

    def with_more(self, more: Sequence[T]) -> PagedList[T]:
        """Return a list with these entries after the present ones."""
        options: dict[str, Any] = {"kind": self._kind, "check": self._check, "cached": self._cached}
        return PagedList(self.store, self.pages, **options, tail=(*self.tail, *more))

    def stored(self, store: Store, per_page: int, suffix: str) -> tuple[Page, ...]:
        """Store the entries of `tail` as pages, and return all pages. The last page is filled up first."""
        pages, tail = list(self.pages), self.tail
        if tail and pages and pages[-1].count < per_page:
            tail = (*self._page(len(pages) - 1), *tail)
            pages.pop()
        starts = range(0, len(tail), per_page)
        return (*pages, *(store_page(store, tail[start : start + per_page], suffix) for start in starts))

    def read_page(self, number: int) -> list[T]:
        """Read a page, and do not keep it. Raises `CorruptionError` if it is missing or damaged."""
        page = self.pages[number]
        name = f"{self.store.location.url}: {page.key}"
        entries = self._decode(check_page(self.store, page), name)
        keys = [entry.key for entry in entries]
        if (len(entries), min(keys, default=""), max(keys, default="")) != (page.count, page.first, page.last):
            raise CorruptionError(f"{name} holds other entries than the dataset version says")
        for entry in entries:
            self._check(entry, name)
        return entries

    def _decode(self, data: bytes, name: str) -> list[T]:
        try:
            size = zstandard.frame_content_size(data)
            if not 0 <= size <= MAX_UNPACKED_BYTES:
                raise CorruptionError(f"{name} is larger than {limits.format_bytes(MAX_UNPACKED_BYTES)}")
            unpacked = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
            entries: list[T] = self._decoder.decode(unpacked)
            return entries
        except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptionError(f"{name} cannot be unpacked: {error}") from error


def check_page(store: Store, page: Page) -> bytes:
    """Read a page, and check its digest. Raises `CorruptionError`."""
    name = f"{store.location.url}: {page.key}"
    try:
        data = store.get(page.key, max_bytes=MAX_PAGE_BYTES)
    except NotFoundError as error:
        raise CorruptionError(f"{name} is missing, though the dataset version names it") from error
    except CapacityError as error:
        raise CorruptionError(f"{name} is larger than the dataset version says") from error
    if len(data) != page.size or digest(data) != page.digest:
        raise CorruptionError(f"{name}: the BLAKE3 digest does not match the dataset version")
    return data


def store_page(store: Store, entries: Sequence[Entry], suffix: str) -> Page:
    """Store a page. The same entries give the same object."""
    data = zstandard.ZstdCompressor(level=6).compress(msgspec.msgpack.encode(list(entries)))
    page_digest, keys = digest(data), [one.key for one in entries]
    page = Page(
        key=f"index/{page_digest[:32]}.{suffix}",
        size=len(data),
        digest=page_digest,
        count=len(entries),
        first=min(keys),
        last=max(keys),
    )
    if not page.is_consistent:
        raise CapacityError(
            f"a page of the version's document would have {len(data)} bytes, above the limit of {MAX_PAGE_BYTES}",
            hint="promote fewer fields of the samples' JSON",
        )
    store.put(page.key, data)
    return page


class ShardSizes(Mapping[str, int]):
    """The sizes of the shards of a paged list, by key.

    A page is kept as arrays: about 60 bytes for each shard.
    """

    def __init__(self, shards: PagedList[Shard]) -> None:
        self._shards = shards
        self._firsts = [page.first for page in shards.pages]
        self._sorted = all(one.last < other.first for one, other in zip(shards.pages, shards.pages[1:], strict=False))
        self._page = lru_cache(CACHED_SIZES)(lambda number: _SizePage(shards.read_page(number)))
        self._size = lru_cache(PAGE_SHARDS)(self._find)

    def __getitem__(self, key: str) -> int:
        size = self._size(key)
        if size is None:
            raise KeyError(key)
        return size

    def __iter__(self) -> Iterator[str]:
        return (shard.key for shard in self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, key: str, default: Any = None) -> Any:
        size = self._size(key)
        return default if size is None else size

    def _find(self, key: str) -> int | None:
        for number in self._candidates(key):
            size = self._page(number).find(key)
            if size is not None:
                return size
        return next((shard.size for shard in self._shards.tail if shard.key == key), None)

    def _candidates(self, key: str) -> Sequence[int]:
        """Return the pages that may hold `key`: one, if the keys of the pages do not overlap."""
        if self._sorted:
            number = bisect_right(self._firsts, key) - 1
            return [number] if number >= 0 and key <= self._shards.pages[number].last else []
        return [number for number, page in enumerate(self._shards.pages) if page.first <= key <= page.last]


class _SizePage:
    """The keys and sizes of a page of shards, sorted by the hashes of the keys."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        keys = [shard.key.encode() for shard in shards]
        hashes = np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._sizes = hashes[order], np.array([shard.size for shard in shards], np.int64)[order]
        ordered = [keys[number] for number in order.tolist()]
        self._ends = np.cumsum([0, *map(len, ordered)])
        self._keys = b"".join(ordered)

    def find(self, key: str) -> int | None:
        data = key.encode(errors="surrogatepass")
        at = int(np.searchsorted(self._hashes, np.uint64(xxhash.xxh3_64_intdigest(data))))
        while at < len(self._hashes) and self._hashes[at] == xxhash.xxh3_64_intdigest(data):
            if self._keys[self._ends[at] : self._ends[at + 1]] == data:
                return int(self._sizes[at])
            at += 1
        return None
