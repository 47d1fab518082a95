"""A store with others mounted is one store to whoever reads it, and opens again from its location."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import NotFoundError, UnsupportedError, UsageError
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.mounts import MAX_MOUNTS, Mounts, open_mounts, url_of
from headrace.dataio.store.open import open_location, open_store


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    base, one, two = (open_store(tmp_path / name) for name in ("base", "one", "two"))
    base.put("a", b"base a")
    base.put("z", b"base z")
    base.put("mounts/m1/hidden", b"never seen")
    one.put("x.tar", b"0123456789")
    one.put("sub/y.tar", b"y")
    two.put("x.tar", b"two")
    with Mounts(base, {"m1": one, "m2": two}) as store:
        yield store


def test_keys_are_answered_by_the_store_that_they_belong_to(mounts: Mounts) -> None:
    assert mounts.get("a") == b"base a"
    assert mounts.get("mounts/m1/sub/y.tar") == b"y"
    assert mounts.get("mounts/m2/x.tar") == b"two"
    piece, pieces = bytearray(3), [bytearray(1), bytearray(2)]
    mounts.get_into("mounts/m1/x.tar", 4, memoryview(piece))
    mounts.get_ranges_into("mounts/m1/x.tar", [(9, memoryview(pieces[0])), (0, memoryview(pieces[1]))])
    assert [bytes(found) for found in (piece, *pieces)] == [b"456", b"9", b"01"]
    found = mounts.stat("mounts/m1/x.tar")
    assert (found.key, found.size) == ("mounts/m1/x.tar", 10)


def test_listings_hold_the_mounted_keys_in_order(mounts: Mounts) -> None:
    every = ["a", "mounts/m1/sub/y.tar", "mounts/m1/x.tar", "mounts/m2/x.tar", "z"]
    for prefix in ("", "m", "mounts/", "mounts/m1", "mounts/m1/", "mounts/m1/s", "mounts/m2/x.tar", "a", "q"):
        assert [info.key for info in mounts.list(prefix)] == [key for key in every if key.startswith(prefix)]


@pytest.mark.parametrize("key", ["mounts/m3/x.tar", "mounts/m1/none", "mounts/m1", "mounts/m1/hidden"])
def test_what_is_not_there_is_not_found(mounts: Mounts, key: str) -> None:
    with pytest.raises((NotFoundError, UsageError)):
        mounts.get(key)


def test_mounted_stores_are_read_only(mounts: Mounts) -> None:
    for write in (
        lambda: mounts.put("mounts/m1/new", b""),
        lambda: mounts.put_if_absent("mounts/m1/new", b""),
        lambda: mounts.put_multipart("mounts/m1/new", [b""]),
        lambda: mounts.delete_many(["mounts/m1/x.tar"]),
    ):
        with pytest.raises(UnsupportedError, match="read-only"):
            write()
    assert mounts.get("mounts/m1/x.tar") == b"0123456789"


def test_its_location_opens_it_again(mounts: Mounts) -> None:
    with open_location(mounts.location) as again:
        assert again.location == mounts.location
        assert list(again.list()) == list(mounts.list())


def test_a_location_with_a_secret_mount_is_not_shareable(tmp_path: Path) -> None:
    secret = open_store(
        "s3://bucket/x", storage_options={"key": "AAA", "secret": "hunter2", "endpoint_url": "http://127.0.0.1:1"}
    )
    with Mounts(open_store(tmp_path), {"m1": secret}) as store:
        assert "hunter2" not in repr(store.location)
        assert "AAA" not in repr(store.location)
        with pytest.raises(UsageError, match="secrets"):
            open_location(store.location)


def test_objects_have_an_address_for_people(mounts: Mounts, tmp_path: Path) -> None:
    assert url_of(mounts, "mounts/m1/sub/y.tar") == f"file://{tmp_path}/one/sub/y.tar"
    assert url_of(mounts, "a") == url_of(mounts.base, "a") == f"file://{tmp_path}/base/a"


def test_closing_leaves_a_base_that_it_does_not_own(tmp_path: Path) -> None:
    closed: list[Store] = []

    class Closing(Mounts):
        def close(self) -> None:
            closed.append(self)

    base, other = Closing(open_store(tmp_path), {}), open_store(tmp_path / "o")
    with pytest.raises(UsageError, match="one level"):
        Mounts(base, {"m1": other})
    inner = open_store(tmp_path)
    inner.close = lambda: closed.append(inner)  # type: ignore[method-assign]
    Mounts(inner, {"m1": other}, owns_base=False).close()
    assert closed == []
    Mounts(inner, {"m1": other}).close()
    assert closed == [inner]


@pytest.mark.parametrize(
    "described",
    [
        7,
        {"m1": "file:///x"},
        {"m1": {}},
        {"m1": {"url": 1}},
        {"m1": {"url": "/x", "options": 3}},
        {"M 1": {"url": "/x"}},
        {1: {"url": "/x"}},
        {f"m{i}": {"url": "/x"} for i in range(MAX_MOUNTS + 1)},
    ],
)
def test_mounts_that_cannot_be_meant_are_refused(tmp_path: Path, described: object) -> None:
    with pytest.raises(UsageError):
        open_mounts(open_store(tmp_path), described, open_store)


def test_a_mount_of_a_mount_is_refused(tmp_path: Path) -> None:
    nested = {"m1": {"url": str(tmp_path), "options": {"mounts": {"m2": {"url": str(tmp_path), "options": {}}}}}}
    with pytest.raises(UsageError, match="one level"):
        open_location(Location(str(tmp_path), {"mounts": nested}, shareable=True))
