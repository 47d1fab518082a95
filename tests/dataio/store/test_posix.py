"""The directory store: the contract, crashes at its named points, and what only file systems do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from headrace.dataio.core.errors import (
    AccessDeniedError,
    AmbiguousWriteError,
    CapacityError,
    NotFoundError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.store import posix
from headrace.dataio.store.base import Store
from headrace.dataio.store.hidden_files import TEMPORARY
from headrace.dataio.store.open import open_store
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.testing.conformance import StoreConformance, StoreMachine
from tests.support.crashed_writer import crash_writer
from tests.support.denied import denied


class TestPosix(StoreConformance):
    racers = 32

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return str(tmp_path / "not" / "yet" / "there")


class _PosixMachine(StoreMachine):
    def open_empty(self) -> Store:
        self.folder = tempfile.TemporaryDirectory()
        return PosixStore(Path(self.folder.name) / "root")

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestModel = _PosixMachine.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("action", ["store.put('k', b'new')", "store.put_if_absent('k', b'new')"])
def test_a_writer_killed_after_it_named_its_bytes_has_written_them_whole(root: Path, action: str) -> None:
    crash_writer(root, "store.posix.named", action)
    store = open_store(root)
    assert [info.key for info in store.list()] == ["k"]
    assert store.get("k") == b"new"
    assert store.put_if_absent("k", b"new")


def test_no_symbolic_link_is_followed_below_the_root(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = open_store(root)
    for key in ("folder/secret", "file"):
        with pytest.raises(UnsupportedError, match="symbolic link"):
            store.get(key)
        with pytest.raises(UnsupportedError, match="symbolic link"):
            store.put(key, b"overwritten")
        store.delete_many([key])
    assert list(store.list()) == list(store.list("folder/")) == []
    assert (outside / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize(
    "path", [b"back\\slash", b"folder/line\nbreak", b"latin-\xff/file", b"/".join([b"long" * 60] * 5)]
)
def test_a_file_with_a_path_that_is_no_key_is_not_listed(root: Path, path: bytes) -> None:
    store = open_store(root)
    store.put("folder/key", b"1")
    file = os.path.join(os.fsencode(root), path)
    os.makedirs(os.path.dirname(file), exist_ok=True)
    Path(os.fsdecode(file)).touch()
    assert [info.key for info in store.list()] == ["folder/key"]


def test_a_root_reached_through_a_link_is_the_same_store(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    open_store(tmp_path / "link").put("k", b"1")
    assert open_store(root).get("k") == b"1"
    assert open_store(tmp_path / "link").location == open_store(root).location


def test_a_file_and_a_folder_cannot_share_a_name(root: Path) -> None:
    store = open_store(root)
    store.put("a", b"")
    store.put("b/c", b"")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(UsageError, match="share a name"):
            write("a/b", b"")
        with pytest.raises(UsageError, match="share a name"):
            write("b", b"1")
    for key in ("b", "a/b"):
        with pytest.raises(NotFoundError):
            store.get(key)


def test_emptied_folders_vanish_as_prefixes_do(root: Path) -> None:
    store = open_store(root)
    store.put("a/b/c", b"")
    store.put("a/d", b"")
    store.delete_many(["a/b/c"])
    assert sorted(os.listdir(root / "a")) == ["d"]
    store.delete_many(["a/d"])
    assert os.listdir(root) == [TEMPORARY]


def test_the_stores_own_folder_is_no_key(root: Path) -> None:
    with pytest.raises(UnsupportedError, match="own"):
        open_store(root).put(f"{TEMPORARY}/x", b"")


def test_a_full_disk_is_a_capacity_error_and_leaves_nothing(root: Path) -> None:
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from headrace.dataio.store.open import open_store\n"
        "from headrace.dataio.core.errors import CapacityError\n"
        f"store = open_store({str(root)!r})\n"
        "store.put('k', b'old')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: store.put('k', bytes(1 << 17))\n"
        "except CapacityError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, check=True).stdout
    assert "writing" in said
    assert "File too large" in said
    assert open_store(root).get("k") == b"old"
    assert os.listdir(root / TEMPORARY) == []


def test_a_directory_without_permission_is_access_denied(root: Path) -> None:
    root.mkdir()
    with denied(root, 0o500), pytest.raises(AccessDeniedError, match="Permission denied"):
        open_store(root).put("k", b"")


def test_what_lies_in_a_folder_that_may_not_be_entered_is_not_said_to_be_missing(root: Path) -> None:
    """Else a run whose checkpoints are hidden by a wrong mode would start from nothing."""
    store = open_store(root)
    store.put("run/step", b"state")
    with denied(root / "run"):
        for look in (
            store.get,
            store.stat,
            store.exists,
            lambda key: list(store.list(key)),
            lambda key: store.delete_many([key]),
        ):
            with pytest.raises(AccessDeniedError, match="Permission denied"):
                look("run/step")
    assert store.get("run/step") == b"state"


@pytest.mark.parametrize(
    ("number", "kind"),
    [("EACCES", AccessDeniedError), ("EROFS", AccessDeniedError), ("ENOSPC", CapacityError), ("EDQUOT", CapacityError)],
)
def test_a_system_error_becomes_the_error_of_its_remedy(
    root: Path, number: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def fail(*_: object) -> None:
        raise OSError(getattr(errno, number), "injected")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match="writing"):
        PosixStore(root).put("k", b"")


@pytest.mark.parametrize("number", ["EEXIST", "EIO", "ETIMEDOUT"])
def test_a_link_that_took_effect_although_it_failed_has_won(
    root: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    link, calls = os.link, []

    def lose_answer(*args: object, **kwargs: object) -> None:
        calls.append(args)
        link(*args, **kwargs)  # type: ignore[arg-type]
        raise OSError(getattr(errno, number), "the reply was lost")

    monkeypatch.setattr(os, "link", lose_answer)
    assert PosixStore(root).put_if_absent("k", b"mine")
    assert len(calls) == 1


def test_a_link_whose_outcome_cannot_be_told_is_ambiguous(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ETIMEDOUT, "the server is away")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(AmbiguousWriteError, match="could not tell"):
        PosixStore(root).put_if_absent("k", b"mine")


def test_a_file_system_without_hard_links_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(UnsupportedError, match="hard links"):
        PosixStore(root).put_if_absent("k", b"mine")


def test_writers_survive_that_others_remove_emptied_folders(root: Path) -> None:
    import threading

    store, stop = open_store(root), threading.Event()

    def churn() -> None:
        while not stop.is_set():
            store.put("a/b/c", b"")
            store.delete_many(["a/b/c"])

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for turn in range(200):
            store.put(f"a/b/d{turn % 2}", b"1")
            store.delete_many([f"a/b/d{turn % 2}"])
    finally:
        stop.set()
        thread.join()


def test_a_folder_that_vanishes_again_and_again_is_given_up_after_a_bound(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def vanish(*args: object) -> None:
        calls.append(args)
        raise FileNotFoundError

    monkeypatch.setattr(os, "replace", vanish)
    with pytest.raises(TransientError, match="removed"):
        PosixStore(root).put("a/b", b"")
    assert len(calls) == posix._PUBLISH_TRIES
