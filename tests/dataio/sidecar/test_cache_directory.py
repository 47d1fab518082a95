"""Where the daemon may not make its cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.dataio.cli import main
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.cache_directory import CacheDirectories
from headrace.dataio.sidecar.settings import CacheTier
from tests.support.disks import disk


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system that no process can write to."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with disk(folder, "ro,size=1m"):
        yield folder


def test_a_disk_that_is_read_only_is_named_with_the_reason_and_what_to_give_instead(
    tmp_path: Path, read_only_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = read_only_disk / "cache"
    (tmp_path / "s").mkdir(mode=0o700)
    socket = ["--socket", str(tmp_path / "s" / "sock"), "--http-port", "off"]
    assert main(["sidecar", "run", *socket, "--cache-dir", str(there)]) == UsageError.exit_code
    output = capsys.readouterr().err
    assert f"{there}: Read-only file system" in output
    assert "give --cache-dir a directory on a disk that can be written" in output


def test_where_no_tier_is_left_all_of_them_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiers = [CacheTier(tmp_path / "file" / name) for name in "ab"]
    with pytest.raises(UsageError, match=r"file/a: File exists, .*file/b: File exists"):
        CacheDirectories.claim(tiers, keep=False)


def test_a_cache_whose_files_have_no_names_keeps_its_size_when_the_configuration_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [100 * MIB]
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free[0] // 4096, f_frsize=4096))
    directories = CacheDirectories.claim([CacheTier(tmp_path / "cache")], keep=False)
    (before,) = directories.places(1 << 40)
    free[0] -= 80 * MIB  # the cache has filled
    (after,) = directories.places(1 << 40, [80 * MIB])
    directories.close()
    assert before.budget == 90 * MIB
    assert after.budget >= before.budget
