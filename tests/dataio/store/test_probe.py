"""Is a server that ignores preconditions found out? And what `headrace doctor` says and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.cli import main
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


def test_the_doctor_finds_a_good_store_good(store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", store_url, "--certify", "--writers", "4", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "good for datasets and for checkpoints with several writers" in said
    assert "exactly one winner" in said
    with open_store(store_url) as store:
        assert list(store.list()) == []


def test_the_doctor_leaves_no_folder_that_was_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    assert main(["doctor", str(there / "not yet" / "data%")]) == 0
    assert os.listdir(there) == []
    assert main(["doctor", str(there)]) == 0
    assert os.listdir(there) == []
    capsys.readouterr()


def test_the_doctor_says_that_no_other_process_sees_a_store_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "memory://looked-at"]) == 0
    assert "verdict: good for experiments; no other process sees it" in capsys.readouterr().out


def test_the_doctor_speaks_json(store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", store_url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [check["name"] for check in report["checks"]][-1] == "conditional write"


@pytest.mark.s3
def test_the_doctor_refuses_a_server_without_preconditions(rclone_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", rclone_url, "--certify"]) == 2
    said = capsys.readouterr().out
    assert "FAILED conditional write" in said
    assert "racing" not in said


@pytest.mark.s3
@pytest.mark.parametrize("as_json", [False, True])
def test_the_doctor_names_a_missing_bucket(s3_url: str, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    assert main(["doctor", "s3://no-such-bucket/x", *(["--json"] if as_json else [])]) == 2
    said = capsys.readouterr()
    if as_json:
        assert json.loads(said.out)["error"]["code"] == "not_found"
    else:
        assert "the bucket 'no-such-bucket' does not exist" in said.err
        assert "next: " in said.err


def test_the_doctor_refuses_a_senseless_number_of_writers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "/tmp", "--writers", "0"]) == 2
    assert "from 1 to 1000" in capsys.readouterr().err


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
