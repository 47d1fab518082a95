"""Which file systems count as local, by the kernel's own lines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.dataio.core.files import (
    LOCAL,
    Scratch,
    file_system_at,
    is_local,
    is_special,
    scratch_folder,
    storage_kind,
    write_atomically,
    write_output,
)

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
    assert file_system_at(path, MOUNTS) == kind


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


# merged from tests.dataio.core.test_files: Files that commands write.


def write(path: Path, text: bytes) -> None:
    with write_output(path) as file:
        file.write(text)


def test_a_file_has_its_name_when_all_is_in_it_and_an_error_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "page"
    write(path, b"old")
    with pytest.raises(ValueError, match="stop"), write_output(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        raise ValueError("stop")
    assert path.read_bytes() == b"old"
    with pytest.raises(FileExistsError), write_atomically(path, replace=False) as file:
        file.write(b"new")
    write(path, b"new")
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("page", b"new")]


def test_a_pipe_is_written_into_and_stays_one_and_so_is_what_a_link_leads_to(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    read: list[bytes] = []
    for path in (pipe, link):
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        write(path, b"page")
        reader.join()
    assert read == [b"page", b"page"]
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to("there")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"new"


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent/page'"):
        write(tmp_path / "absent" / "page", b"")


def test_devices_and_pipes_are_special_and_files_folders_and_what_is_not_there_are_not(tmp_path: Path) -> None:
    assert is_special(Path("/dev/null"))
    assert not any(map(is_special, (tmp_path, tmp_path / "absent", Path(__file__))))


HOLDER = """
import sys
from headrace.dataio.core.files import scratch_folder
with scratch_folder("made-", sys.argv[1]) as folder:
    open(folder + "/file", "w").close()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_and_all_in_it_is_gone_at_the_end(tmp_path: Path) -> None:
    with scratch_folder("made-", str(tmp_path)) as folder:
        assert os.path.basename(folder).startswith("made-")
        (Path(folder) / "deep").mkdir()
        (Path(folder) / "deep" / "file").touch()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_maker_left_goes_with_the_next_and_what_others_use_stays(tmp_path: Path) -> None:
    with scratch_folder("made-", str(tmp_path)) as mine:
        command = [sys.executable, "-c", HOLDER, str(tmp_path)]
        dead = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert dead.stdin is not None
        assert dead.stdout is not None
        left = dead.stdout.readline().strip()
        with scratch_folder("made-", str(tmp_path)):
            assert Path(left).is_dir()  # while its maker lives
        dead.send_signal(signal.SIGKILL)
        dead.communicate()
        assert (Path(left) / "file").is_file()
        (tmp_path / "other-prefix").mkdir()
        with scratch_folder("made-", str(tmp_path)) as another:
            assert sorted(os.listdir(tmp_path)) == sorted(
                ["other-prefix", os.path.basename(mine), os.path.basename(another)]
            )


def test_links_and_files_of_that_name_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "made-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "made-file").touch()
    with scratch_folder("made-", str(tmp_path)):
        pass
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "made-file", "made-link"]


def test_removing_twice_or_what_is_gone_is_nothing(tmp_path: Path) -> None:
    scratch = Scratch("made-", str(tmp_path))
    shutil.rmtree(scratch.path)
    scratch.remove()
    scratch.remove()
    with pytest.raises(OSError), scratch_folder("made-", str(tmp_path / "missing")):
        pass


# merged from tests.dataio.core.test_files: Memory and disks are told apart.


def test_a_tmpfs_is_memory() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    assert storage_kind(Path("/dev/shm")) == "memory"


def test_whatever_is_not_known_is_a_disk(tmp_path: Path) -> None:
    assert storage_kind(tmp_path / "nothing") == "disk"
    assert storage_kind(tmp_path, tmp_path / "no such file") == "disk"
    (tmp_path / "mountinfo").write_text("garbage\n\n1 2 x\n - \n")
    assert storage_kind(tmp_path, tmp_path / "mountinfo") == "disk"


@pytest.mark.parametrize(("kind", "found"), [("tmpfs", "memory"), ("ext4", "disk"), ("xfs", "disk")])
def test_the_device_decides(kind: str, found: str, tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    text = f"20 1 0:0 / / rw - ext4 /dev/x rw\n21 1 {number} / /there rw,nosuid shared:3 - {kind} none rw\n"
    (tmp_path / "mountinfo").write_text(text)
    assert storage_kind(tmp_path, tmp_path / "mountinfo") == found
