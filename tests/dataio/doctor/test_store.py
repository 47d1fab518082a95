"""What `headrace doctor URL` says of a store, and what it returns."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from headrace.dataio.cli import main
from headrace.dataio.doctor import store as doctor_store
from headrace.dataio.doctor.findings import Finding
from headrace.dataio.doctor.store import judge_clock, judge_latency
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.s3_server import S3Server

ONLY = ["--only", "store"]


@pytest.fixture(params=["s3fs", "obstore"])
def rclone_url(request: pytest.FixtureRequest, rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEADRACE_S3", request.param)
    for name, value in rclone_server.environment().items():
        monkeypatch.setenv(name, value)
    return "s3://headrace/probe"


def test_the_doctor_finds_a_good_store_good(store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *ONLY, store_url, "--certify", "--writers", "4", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "good for datasets and for checkpoints with several writers" in said
    assert "exactly one winner" in said
    with open_store(store_url) as store:
        assert list(store.list()) == []


def test_the_doctor_leaves_no_folder_that_was_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    assert main(["doctor", *ONLY, str(there / "not yet" / "data%")]) == 0
    assert os.listdir(there) == []
    assert main(["doctor", *ONLY, str(there)]) == 0
    assert os.listdir(there) == []
    capsys.readouterr()


def test_the_doctor_says_that_no_other_process_sees_a_store_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *ONLY, "memory://looked-at"]) == 0
    assert "verdict: good for experiments; no other process sees it" in capsys.readouterr().out


def test_the_doctor_speaks_json(store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *ONLY, store_url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [check["name"] for check in report["store"]["checks"]][-1] == "conditional write"


@pytest.mark.s3
def test_the_doctor_refuses_a_server_without_preconditions(rclone_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *ONLY, rclone_url, "--certify"]) == 2
    said = capsys.readouterr().out
    assert "error    conditional write" in said
    assert "racing" not in said


@pytest.mark.s3
@pytest.mark.parametrize("as_json", [False, True])
def test_the_doctor_names_a_missing_bucket(s3_url: str, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    assert main(["doctor", *ONLY, "s3://no-such-bucket/x", *(["--json"] if as_json else [])]) == 2
    said = capsys.readouterr()
    if as_json:
        assert json.loads(said.out)["error"]["code"] == "not_found"
    else:
        assert "the bucket 'no-such-bucket' does not exist" in said.err
        assert "next: " in said.err


def test_the_doctor_refuses_a_senseless_number_of_writers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *ONLY, "/tmp", "--writers", "0"]) == 2
    assert "from 1 to 1000" in capsys.readouterr().err


def test_a_store_that_does_not_answer_ends_the_checks_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs, called = threading.Event(), list[str]()

    def hang(store: Store, scratch: str) -> tuple[Finding, ...]:
        called.append(scratch)
        hangs.wait(60)
        return ()

    monkeypatch.setattr(doctor_store, "_STEPS", [("write and read", hang), *doctor_store._STEPS])
    monkeypatch.setattr(doctor_store, "STEP_SECONDS", 0.05)
    try:
        assert main(["doctor", str(tmp_path), *ONLY, "--json"]) == 3
    finally:
        hangs.set()
    assert len(called) == 1
    report = json.loads(capsys.readouterr().out)
    assert [check["severity"] for check in report["store"]["checks"]] == ["unknown"]
    assert report["error"]["code"] == "transient"


@pytest.mark.parametrize("function", ["open_store", "_clear"])
def test_a_mount_that_does_not_answer_ends_the_command_in_time(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs, called, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(*_: object) -> tuple[Finding, ...]:
        called.set()
        if not hangs.wait(30):
            ended.set()
        return ()

    monkeypatch.setattr(doctor_store, function, hang)
    monkeypatch.setattr(doctor_store, "_STEPS", [("write and read", lambda *_: (Finding("write and read", "ok"),))])
    monkeypatch.setattr(doctor_store, "STEP_SECONDS", 5.0)
    try:
        code = main(["doctor", str(tmp_path), *ONLY, "--json"])
        assert called.is_set()
        assert not ended.is_set(), "the command did not wait for it"
    finally:
        hangs.set()
    report = json.loads(capsys.readouterr().out)["store"]
    expected = (3, "it cannot be opened") if function == "open_store" else (0, report["verdict"])
    assert (code, report["verdict"]) == expected


@pytest.mark.parametrize(
    ("difference", "severity"),
    [
        (0.5, "ok"),
        (-29.0, "ok"),
        (31.0, "warning"),
        (-4000.0, "warning"),
        (float("nan"), "unknown"),
        (-1.8e9, "unknown"),
    ],
)
def test_a_store_whose_clock_differs_is_named(difference: float, severity: str) -> None:
    assert judge_clock(difference).severity == severity


def test_a_slow_store_is_named() -> None:
    assert [judge_latency(seconds).severity for seconds in (0.01, 2.0)] == ["ok", "note"]


def test_only_the_store_needs_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *ONLY]) == 2
    assert "needs the URL" in capsys.readouterr().err
