"""Where the daemon may not make its cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dataio.cli import main
from dataio.core.errors import UsageError
from dataio.sidecar.cachedir import CacheDirectories
from dataio.sidecar.config import CacheTier


def test_a_disk_that_is_read_only_is_named_with_the_reason_and_what_to_give_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))

    there = tmp_path / "disk" / "cache"
    (tmp_path / "s").mkdir(mode=0o700)
    monkeypatch.setattr("dataio.sidecar.cachedir.private_directory", refuse)
    socket = ["--socket", str(tmp_path / "s" / "sock"), "--http-port", "off"]
    assert main(["sidecar", "run", *socket, "--cache-dir", str(there)]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert f"{there}: Read-only file system" in said
    assert "give --cache-dir a directory on a disk that can be written" in said


def test_where_no_tier_is_left_all_of_them_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiers = [CacheTier(tmp_path / "file" / name) for name in "ab"]
    with pytest.raises(UsageError, match=r"file/a: File exists, .*file/b: File exists"):
        CacheDirectories.claim(tiers, keep=False)
