"""A file that hangs or kills its prober costs itself only."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.probe_pool import ProbePool, seconds_for
from headrace.dataio.shards.media.messages import Description, Failure
from tests.support.written_media import MakeClip

# a worker that misbehaves for some names and else answers like the real one
STUB = """
import os, signal, sys, time
from headrace.dataio.shards.media import describe
from headrace.dataio.shards.workers import worker
real = describe.describe
def faulty_describe(files, text_field):
    name = os.path.basename(files[0][1])
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(f"{os.getpid()} {name}\\n")
    if name.startswith("hang"):
        time.sleep(600)
    if name.startswith("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("exit"):
        os._exit(3)
    if name.startswith("noise"):
        os.write(1, b"noise on standard output")
    return real(files, text_field)
describe.describe = faulty_describe
worker.serve_probes()
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    return [sys.executable, "-c", STUB]


def log(tmp_path: Path) -> list[tuple[int, str]]:
    lines = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


def groups(make_clip: MakeClip, folder: Path, *names: str) -> list[Group]:
    clip = make_clip(folder / "clip.mp4", frames=3)
    found = []
    for name in names:
        (folder / f"{name}.mp4").write_bytes(clip.read_bytes())
        found.append(Group(name, (("mp4", str(folder / f"{name}.mp4")),), 1000))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hang_and_crashes_cost_their_own_files_only(
    tmp_path: Path, make_clip: MakeClip, stub: list[str], workers: int
) -> None:
    requested = groups(make_clip, tmp_path, "a", "hang", "b", "crash", "c", "exit", "noise", "d")

    def limit(group: Group) -> float:
        return 0.5 if group.key == "hang" else 60

    with ProbePool(workers, limit, stub) as pool:
        answers = list(pool.describe(requested))
    assert [group for group, _ in answers] == requested  # in order
    failures = {group.key: (a.code, a.reason) for group, a in answers if isinstance(a, Failure)}
    assert failures == {
        "hang": ("deadline", "reading it took longer than 0 s and was stopped"),
        "crash": ("corruption", "reading it crashed the decoder (SIGSEGV)"),
        "exit": ("corruption", "reading it crashed the decoder (exit code 3)"),
    }
    assert all(isinstance(a, Description) for group, a in answers if group.key not in failures)
    assert {name for _, name in log(tmp_path)} >= {"hang.mp4", "crash.mp4", "exit.mp4"}  # the faults fired
    for pid, _ in log(tmp_path):
        wait_until_gone(pid)


def test_workers_are_reused_and_bounded(tmp_path: Path, make_clip: MakeClip, stub: list[str]) -> None:
    requested = groups(make_clip, tmp_path, *(f"n{i}" for i in range(12)))
    with ProbePool(2, seconds_for, stub) as pool:
        assert len(list(pool.describe(requested))) == 12
    assert 1 <= len({pid for pid, _ in log(tmp_path)}) <= 2


def test_only_a_bounded_number_is_asked_ahead(tmp_path: Path, make_clip: MakeClip, stub: list[str]) -> None:
    requested = groups(make_clip, tmp_path, "a")
    taken = []

    def endless() -> Iterator[Group]:
        while True:
            taken.append(1)
            yield requested[0]

    with ProbePool(1, seconds_for, stub) as pool:
        next(pool.describe(endless()))
        assert len(taken) <= 4


def test_closing_early_kills_what_is_running(tmp_path: Path, make_clip: MakeClip, stub: list[str]) -> None:
    requested = groups(make_clip, tmp_path, "a", "hang", "b")
    with ProbePool(1, lambda _: 600.0, stub) as pool:
        results = pool.describe(requested + requested)
        assert isinstance(results, Generator)
        next(results)
        deadline = time.monotonic() + 30
        while "hang.mp4" not in [name for _, name in log(tmp_path)]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        results.close()
    for pid, _ in log(tmp_path):
        wait_until_gone(pid)


def test_a_worker_that_does_not_start_is_an_error_of_the_machine_not_of_a_file(
    tmp_path: Path, make_clip: MakeClip
) -> None:
    with (
        ProbePool(1, seconds_for, [sys.executable, "-c", "import sys; sys.exit(1)"]) as pool,
        pytest.raises(UnsupportedError, match="does not start"),
    ):
        list(pool.describe(groups(make_clip, tmp_path, "a")))


def test_a_hanging_worker_dies_with_its_killed_parent(tmp_path: Path, make_clip: MakeClip, stub: list[str]) -> None:
    (hang,) = groups(make_clip, tmp_path, "hang")
    parent = textwrap.dedent("""
        import sys
        from pathlib import Path
        from headrace.dataio.shards.ingest.probe_pool import ProbePool
        from headrace.dataio.shards.ingest.grouping import Group
        with ProbePool(1, lambda _: 600.0, [sys.executable, "-c", sys.argv[2]]) as pool:
            list(pool.describe([Group("hang", (("mp4", sys.argv[1]),), 1)]))
    """)
    process = subprocess.Popen([sys.executable, "-c", parent, str(hang.files[0][1]), STUB], env=os.environ)
    try:
        deadline = time.monotonic() + 60
        while not log(tmp_path):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    wait_until_gone(log(tmp_path)[0][0])


def test_large_files_get_more_time(tmp_path: Path) -> None:
    small, large = (Group("a", (("mp4", str(tmp_path / "a.mp4")),), size) for size in (0, 4 << 30))
    assert seconds_for(small) == 60
    assert seconds_for(large) == 60 + 1024
