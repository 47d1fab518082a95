"""Is a server that ignores preconditions found out?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.probe import certify, probe_preconditions, require_preconditions
from headrace.dataio.testing.s3_server import S3Server


@pytest.fixture(params=["s3fs", "obstore"])
def rclone_url(request: pytest.FixtureRequest, rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEADRACE_S3", request.param)
    for name, value in rclone_server.environment().items():
        monkeypatch.setenv(name, value)
    return "s3://headrace/probe"


def test_a_store_that_keeps_preconditions_passes_and_is_left_clean(store: Store) -> None:
    assert probe_preconditions(store, "some/folder").supported
    require_preconditions(store)
    assert list(store.list()) == []


@pytest.mark.s3
def test_a_server_that_ignores_preconditions_is_refused_with_the_reason_and_the_next_step(rclone_url: str) -> None:
    with open_store(rclone_url) as store:
        result = probe_preconditions(store)
        assert not result.supported
        assert "ignored" in result.reason
        with pytest.raises(UnsupportedError, match=r"ignored.*own repository"):
            require_preconditions(store)
        assert list(store.list()) == []


def test_a_race_with_one_winner_is_fair(store: Store) -> None:
    races = list(certify(store, "", writers=6, rounds=1))
    assert [race.fair for race in races] == [True]
    assert list(store.list()) == []


class _Careless(PosixStore):
    """Looks before it writes, which passes a sequential probe and fails a race."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        if self.exists(key):
            return self.get(key) == bytes(data)
        self.put(key, data)
        return True


def test_a_store_that_passes_the_probe_but_has_many_winners_is_found_by_racing(tmp_path: Path) -> None:
    store = _Careless(tmp_path / "store")
    assert probe_preconditions(store).supported
    assert any(not race.fair for race in certify(store, "", writers=50, rounds=40))


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts an S3 server and then waits."""
    program = (
        "import sys\nfrom headrace.dataio.testing.s3_server import start_rclone\n"
        "server = start_rclone()\nprint(server.process.pid, flush=True)\nsys.stdin.read()\n"
    )
    command, environment = [sys.executable, "-c", program], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.s3
def test_a_server_dies_with_the_process_that_started_it(other_process: subprocess.Popen[bytes]) -> None:
    assert other_process.stdout is not None
    server = int(other_process.stdout.readline())
    assert os.path.exists(f"/proc/{server}")
    other_process.kill()
    other_process.wait()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{server}") and "Z" not in Path(f"/proc/{server}/stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.02)
