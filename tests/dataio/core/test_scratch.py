from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.dataio.core.scratch import Scratch, scratch_folder

HOLDER = """
import sys
from headrace.dataio.core.scratch import scratch_folder
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
