"""Which file systems count as local, by the kernel's own lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.dataio.core.filesystem import LOCAL, is_local, kind_at

MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:25 / /data rw shared:2 - nfs4 server:/export rw,vers=4.2
31 30 259:3 / /data/near rw - xfs /dev/nvme1n1 rw
32 22 0:40 /one /with\040space rw master:7 - fuse.juicefs juice rw
33 22 0:41 / /twice rw - tmpfs tmpfs rw
34 22 0:42 / /twice rw - lustre 10.0.0.1@tcp:/fs rw
"""


REMOTE = (
    "nfs nfs4 lustre gpfs beegfs ceph fuse fuse.sshfs fuse.s3fs fuseblk 9p virtiofs cifs smb3 afs wekafs of-tomorrow"
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/data", "nfs4"),
        ("/data/set/shards", "nfs4"),
        ("/data/near/set", "xfs"),
        ("/database", "ext4"),
        ("/with space/x", "fuse.juicefs"),
        ("/twice/x", "lustre"),
    ],
)
def test_the_innermost_mount_and_the_later_one_tells(path: str, kind: str) -> None:
    assert kind_at(path, MOUNTS) == kind


@pytest.mark.parametrize("kind", [*REMOTE.split()])
def test_whatever_lies_behind_a_network_or_is_unknown_is_not_local(kind: str, tmp_path: Path) -> None:
    assert kind not in LOCAL
    (tmp_path / "mountinfo").write_text(f"22 1 0:9 / / rw - {kind} somewhere rw\n")
    assert not is_local(tmp_path, tmp_path / "mountinfo")


@pytest.mark.parametrize("text", ["", "garbage\n\n1 2 x\n - \n", "22 1 0:9 / /elsewhere rw - ext4 disk rw\n"])
def test_what_nothing_tells_of_is_not_local(text: str, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(text)
    assert not is_local(tmp_path, tmp_path / "mountinfo")
    assert not is_local(tmp_path, tmp_path / "no such file")


def test_this_machines_memory_is() -> None:
    assert is_local("/dev/shm")
