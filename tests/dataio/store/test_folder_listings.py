"""What `list_folders` costs, and what is special to one back end; `FolderConformance` has what all of them keep."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.core.errors import AccessDeniedError, CapacityError, TransientError
from headrace.dataio.store import s3
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.hidden_files import TEMPORARY
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_store
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.retry import Retry
from headrace.dataio.store.s3 import S3Store
from headrace.dataio.store.s3_config import parse
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.folder_conformance import NAMES, FolderConformance, in_key_order
from headrace.dataio.testing.s3_server import S3Server
from headrace.dataio.testing.system import ManualClock
from tests.conftest import use_s3_server
from tests.support.denied import denied

pytestmark = pytest.mark.slow


# S3


@pytest.mark.s3
class TestRclone(FolderConformance):
    """A server that lists by key, as S3 does. It has no conditional writes, so it cannot pass the whole suite."""

    @pytest.fixture
    def store(self, rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        use_s3_server(rclone_server, monkeypatch)
        with open_store(f"s3://headrace/{uuid.uuid4().hex}") as opened:
            yield opened


@pytest.mark.s3
def test_listing_1200_folders_takes_two_requests_however_many_objects_they_have(
    behind: Store, proxy: FaultProxy
) -> None:
    folders = [f"{number:05}" for number in range(1200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: behind.put(key, b"x"), [f"runs/{name}/{n}" for name in folders for n in range(3)]))

    def listed(after: str) -> tuple[list[str], int]:
        proxy.requests.clear()
        return list(behind.list_folders("runs/", after=after)), len(proxy.requests)

    assert listed("") == (folders, 2)
    assert listed("00099") == (folders[100:], 2)
    assert listed("00998") == (folders[999:], 1)
    assert listed("01199") == ([], 1)


@pytest.mark.s3
def test_a_listing_of_folders_goes_on_after_a_failed_page(behind: Store, proxy: FaultProxy) -> None:
    for name in NAMES:
        behind.put(f"{name}/x", b"")
    proxy.inject(Fault.RESET_BODY, path="list-type=2")
    proxy.inject(Fault.ERROR_IN_200, path="list-type=2")
    assert list(behind.list_folders()) == in_key_order(NAMES)
    assert proxy.fired == {Fault.RESET_BODY: 1, Fault.ERROR_IN_200: 1}


@pytest.mark.s3
def test_the_folders_of_a_whole_bucket_are_those_of_its_objects(s3_server: S3Server, s3_url: str) -> None:
    url = s3_server.create_bucket(f"bucket-{uuid.uuid4().hex}")
    with open_store(url) as store:
        store.put_multipart("a/large", [bytes(9 << 20)])  # SeaweedFS keeps the parts of uploads in a folder of its own
        store.put("b/x", b"")
        assert list(store.list_folders()) == ["a", "b"]
        assert list(store.list_folders(after="a")) == ["b"]


@pytest.mark.s3
def test_a_folder_whose_name_can_be_in_no_key_is_passed_over(s3_url: str) -> None:
    root = parse(s3_url, {"client": "s3fs"})
    with S3Store(root) as store:
        store.put("a/b", b"1")
        client = store._client
        client.run(client.call("put_object", "test", Key=f"{root.prefix}/tab\there/x", Body=b""))
        assert list(store.list_folders()) == ["a"]


@pytest.mark.s3
def test_sorting_folders_for_a_server_that_lists_by_name_is_bounded(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_SORTED_LISTING", 2)
    with open_store(s3_url) as store:
        for name in ("a", "b", "c"):
            store.put(f"{name}/x", b"")
        assert list(store.list_folders(after="a")) == ["b", "c"]
        with pytest.raises(CapacityError, match="longer prefix"):
            list(store.list_folders())


class _Pages(S3Store):
    """Answers with these pages of folders, and records what it was asked."""

    def answer(self, server: str, *pages: list[str]) -> None:
        self.asked = list[dict[str, str]]()
        self._server, self._answers = server, pages

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        self.asked.append(options)
        for names in self._answers:
            headers = {"HTTPHeaders": {"server": self._server}}
            yield {"CommonPrefixes": [{"Prefix": f"{prefix}{n}/"} for n in names], "ResponseMetadata": headers}


@pytest.fixture
def pages() -> Iterator[_Pages]:
    with _Pages(parse("s3://bucket/run", {"client": "s3fs"}, {})) as store:
        yield store


def test_a_server_that_ignores_where_to_start_lists_only_later_folders_all_the_same(pages: _Pages) -> None:
    pages.answer("AmazonS3", ["a-b", "a"], ["a0", "a0", "b"], ["b", ""])
    assert list(pages.list_folders("x/", after="a")) == ["a0", "b"]
    assert pages.asked == [{"Delimiter": "/", "StartAfter": "run/x/a/"}]


@pytest.mark.parametrize(("after", "requests"), [("b", 1), ("a-b", 2), ("", 1)])
def test_a_server_that_sorts_names_lists_from_the_start_after_a_name_that_other_names_begin(
    pages: _Pages, after: str, requests: int
) -> None:
    pages.answer("SeaweedFS 8000GB", ["a", "a-b", "c"])
    expected = [name for name in ("a-b", "a", "c") if not after or name + "/" > after + "/"]
    assert list(pages.list_folders(after=after)) == expected
    assert len(pages.asked) == requests
    assert "StartAfter" not in pages.asked[-1] or after == "b"


def test_pages_of_a_server_that_lists_by_key_are_asked_for_one_at_a_time(pages: _Pages) -> None:
    pages.answer("AmazonS3", ["a"], ["b"])
    names = pages.list_folders()
    assert next(names) == "a"
    pages._answers = ()
    assert next(names) == "b"


# directories


def test_a_directory_is_read_once_and_no_directory_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read, real = PosixStore(tmp_path), list[str](), os.scandir
    for number in range(1200):
        for name in ("x", "y"):
            (tmp_path / "runs" / f"{number:05}").mkdir(parents=True, exist_ok=True)
            (tmp_path / "runs" / f"{number:05}" / name).touch()
    monkeypatch.setattr(os, "scandir", lambda path: (read.append(str(path)), real(path))[1])
    assert list(store.list_folders("runs/", after="00009")) == [f"{number:05}" for number in range(10, 1200)]
    assert read == [str(tmp_path / "runs")]


def test_what_is_no_folder_of_objects_is_not_listed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    store = PosixStore(root)
    store.put("folder/a/x", b"1")
    (outside / "b").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "folder" / "link").symlink_to(outside / "b")
    (root / "folder" / "no\nkey").mkdir()
    (root / "folder" / "back\\slash").mkdir()
    os.mkdir(os.fsencode(root / "folder") + b"/\xff")
    assert (root / TEMPORARY).is_dir()
    assert list(store.list_folders()) == ["folder"]
    assert list(store.list_folders("folder/")) == ["a"]
    assert list(store.list_folders("link/")) == list(store.list_folders("folder/link/")) == []


def test_a_directory_that_may_not_be_read_is_no_directory_without_folders(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.put("run/step/x", b"state")
    with denied(tmp_path / "run"), pytest.raises(AccessDeniedError, match="Permission denied"):
        list(store.list_folders("run/"))


# fsspec


def test_a_local_file_system_through_fsspec_lists_the_same_folders(tmp_path: Path) -> None:
    for name in NAMES:
        PosixStore(tmp_path).put(f"runs/{name}/x", b"1")
    PosixStore(tmp_path).put("runs/object", b"1")
    with open_store(f"local://{tmp_path}") as store:
        assert list(store.list_folders("runs/", after="a-b")) == in_key_order(NAMES)[3:]
        assert list(store.list_folders("runs/object/")) == list(store.list_folders("none/")) == []


# retries and mounts


class _Interrupted(PosixStore):
    """Its listing of folders fails after every second name."""

    failures = 0

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        for turn, name in enumerate(super().list_folders(prefix, after=after)):
            if turn == 2 and self.failures < 3:
                self.failures += 1
                raise TransientError("page lost")
            yield name

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise AssertionError(prefix)


def test_a_listing_of_folders_goes_on_where_it_failed_without_losing_or_repeating_names(tmp_path: Path) -> None:
    inner = _Interrupted(tmp_path)
    for name in NAMES:
        inner.put(f"{name}/x", b"")
    assert list(Retry(inner, clock=ManualClock()).list_folders(after="a b")) == in_key_order(NAMES)[2:]
    assert inner.failures == 3


def test_mounts_are_folders_of_the_one_store(tmp_path: Path) -> None:
    base, one, two = (PosixStore(tmp_path / name) for name in ("base", "one", "two"))
    for key in ("a/x", "z/x", "mounts/hidden/x", "mounts-/x"):
        base.put(key, b"")
    one.put("sub/y/x", b"")
    store = Mounts(base, {"m2": two, "m1": one})
    assert list(store.list_folders()) == ["a", "mounts-", "mounts", "z"]
    assert list(store.list_folders(after="mounts")) == ["z"]
    assert list(store.list_folders("mounts/")) == ["m1", "m2"]
    assert list(store.list_folders("mounts/", after="m1")) == ["m2"]
    assert list(store.list_folders("mounts/m1/")) == ["sub"]
    assert list(store.list_folders("mounts/m1/sub/", after="x")) == ["y"]
    for prefix in ("mounts/m2/", "mounts/hidden/", "mounts//", "a/"):
        assert list(store.list_folders(prefix)) == [], prefix
    assert list(Mounts(base, {}).list_folders()) == ["a", "mounts-", "z"]
