"""Opening the mounts of a version: nothing stays open after an error, and the reserved mount is only for joined shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import mounting
from headrace.dataio.shards.versions.mounting import (
    JOINED_MOUNT,
    how_to_open,
    mount_of,
    mounts_given_to,
    with_mounts,
)
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper


class _Closeable(Wrapper):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(UsageError("no"), CorruptionError), (MemoryError(), MemoryError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["an error of the store", "any other error", "an interrupt"],
)
def test_an_error_closes_the_mounts_that_were_opened_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    opened = list[_Closeable]()

    def open_once(url: str, *, storage_options: Any = None) -> Store:
        if opened:
            raise error
        opened.append(_Closeable(open_store(url)))
        return opened[0]

    with open_store(tmp_path / "ds") as store:
        mounts = []
        for name in ("a", "b"):
            (tmp_path / "ds" / name).mkdir(parents=True)
            with open_store(tmp_path / "ds" / name) as inner:
                mounts.append(mount_of(inner.location))
        document = versions.new_document("ds", (), (), version=1, parent=None, message="", mounts=tuple(mounts))
        monkeypatch.setattr(mounting, "open_store", open_once)
        with pytest.raises(raised):
            with_mounts(store, document, False, {})
    assert [one.closed for one in opened] == [True]


@pytest.mark.parametrize(
    "mount",
    [
        versions.Mount(name="joined", url="file:///etc"),
        versions.Mount(name="joined", url="s3://bucket"),
        versions.Mount(name="joined", url="joined://x"),
        versions.Mount(name="joined", url="joined:", options={"mounts": {}}),
        versions.Mount(name="m1", url="joined:"),
    ],
    ids=lambda mount: f"{mount.name} {mount.url}",
)
@pytest.mark.parametrize("trust", [False, True])
def test_the_reserved_mount_is_nothing_else(tmp_path: Path, mount: versions.Mount, trust: bool) -> None:
    with open_store(tmp_path) as store:
        document = versions.new_document("ds", (), (), version=1, parent=None, message="", mounts=(mount,))
        with pytest.raises((CorruptionError, UnsupportedError)):
            with_mounts(store, document, False, {}, trust)


def test_joined_shards_need_no_trust(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        document = versions.new_document("ds", (), (), version=1, parent=None, message="", mounts=(JOINED_MOUNT,))
        opened, owned = with_mounts(store, document, False, {})
        assert isinstance(opened, Mounts)
        assert opened.joined is not None
        assert owned
        assert with_mounts(opened, document, False, {}) == (opened, False)
        assert mounts_given_to(opened) == [JOINED_MOUNT]
        assert how_to_open(store.location, JOINED_MOUNT) == ""
