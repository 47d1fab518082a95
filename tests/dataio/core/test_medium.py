"""Memory and disks are told apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.dataio.core.medium import medium


def test_a_tmpfs_is_memory() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    assert medium(Path("/dev/shm")) == "memory"


def test_whatever_is_not_known_is_a_disk(tmp_path: Path) -> None:
    assert medium(tmp_path / "nothing") == "disk"
    assert medium(tmp_path, tmp_path / "no such file") == "disk"
    (tmp_path / "mountinfo").write_text("garbage\n\n1 2 x\n - \n")
    assert medium(tmp_path, tmp_path / "mountinfo") == "disk"


@pytest.mark.parametrize(("kind", "found"), [("tmpfs", "memory"), ("ext4", "disk"), ("xfs", "disk")])
def test_the_device_decides(kind: str, found: str, tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    text = f"20 1 0:0 / / rw - ext4 /dev/x rw\n21 1 {number} / /there rw,nosuid shared:3 - {kind} none rw\n"
    (tmp_path / "mountinfo").write_text(text)
    assert medium(tmp_path, tmp_path / "mountinfo") == found
