"""`headrace sidecar status`, and what systemd is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.dataio.cli import main
from headrace.dataio.sidecar import cli_status
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.client import SaveMeter
from headrace.dataio.sidecar.systemd import notify, ready
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for
from tests.support.denied import denied


def test_the_terminal_shows_what_the_page_shows(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    saver = SaveMeter("exp[bold]42\x1b[31m")
    saver.committed(7, 1.0)
    with daemon.connect() as sidecar:
        sidecar.reporting = saver.report
        wait_for(lambda: daemon.status()["training"])
        sidecar.send(m.Report(5, "g", wall=1e9, wait=4e8, steps=10))
        wait_for(lambda: daemon.status()["training"][0]["steps"] == 10)
        assert main(["sidecar", "status", "--socket", str(daemon.socket)]) == 0
        text = capsys.readouterr().out
        assert "exp[bold]42[31m" in text  # without the escape character, and not as markup
        assert "\x1b" not in text
        assert f"process {daemon.pid}" in text
        assert main(["sidecar", "status", "--socket", str(daemon.socket), "--json"]) == 0
        state = json.loads(capsys.readouterr().out)
        assert state["training"][0]["last_step"] == 7
        assert len(json.dumps(state)) < 60_000


def test_the_share_of_hits_is_shown_only_if_something_was_read_in_the_last_minute() -> None:
    cache = {"used_bytes": 0, "budget_bytes": 1 << 30, "files": 0, "fetched_bytes": 0, "waiting": 0, "paused": False}

    def shown(**rates: float | None) -> str:
        return cli_status._cache({"cache": cache, "rates": rates}).plain.partition("0 B fetched; ")[2]

    assert shown() == "no reads yet, 0 requests waiting"
    assert shown(fetched_bytes_per_second=0, hit_ratio=None).endswith("no reads in the last minute, 0 requests waiting")
    early = shown(fetched_bytes_per_second=1e6, hit_ratio=None)
    assert early.endswith("fetched, no loader reports its reads, 0 requests waiting")
    read = shown(fetched_bytes_per_second=1e6, cache_bytes_per_second=3e6, hit_ratio=0.75)
    assert read.endswith("fetched, hits 75.0 %, 0 requests waiting")


def test_the_command_does_not_count_itself_as_a_client(daemon: RunningDaemon) -> None:
    command = [sys.executable, "-m", "headrace", "sidecar", "status", "--socket", str(daemon.socket)]
    with daemon.connect():
        assert ", 1 client, " in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wait_for(
        lambda: subprocess.run(command, capture_output=True, text=True, check=True).stdout.count(", 0 clients, ") == 1
    )


def test_the_terminal_says_how_prefetching_did_against_its_forecast() -> None:
    tier = {"used_bytes": 1 << 20, "budget_bytes": 1 << 30, "directory": "/dev/shm/m\x1b", "paused": True}
    nvme = {**tier, "directory": "/nvme", "medium": "disk", "hit_bytes": 3 << 20, "paused": False}
    state = {
        "cache": {"tiers": [tier, nvme], "asked_bytes": 4 << 20},
        "prefetch": {
            "reads_ready": 97,
            "reads_late": 3,
            "window_bytes": 8 << 20,
            "hedged": 1,
            "forecasts": 50,
            "forecast_error_median_s": -0.5,
            "forecast_error_p95_s": 2.0,
        },
        "fetching": {"exp42": {"waiting": 2, "connections": 1, "bytes_in_flight": 4 << 20}},
    }
    first, second, ahead, stores = (line.plain for line in cli_status.cache_lines(state))
    assert first == "  tier 0  1.0 MiB of 1.0 GiB in /dev/shm/m , PAUSED: disk not writable"
    assert second == "  tier 1  1.0 MiB of 1.0 GiB in /nvme (disk), 3.0 MiB hits (75.0 % of requested bytes)"
    assert "97 of 100 reads were ready in time (97.0 %)" in ahead
    assert "needed 0.5 s sooner than predicted, 95 % within 2 s" in ahead
    assert stores == "stores  exp42 1 (4.0 MiB), 2 waiting"
    assert cli_status.cache_lines({"cache": {}}) == [], "nothing was announced"
    few = {"cache": {}, "prefetch": {"reads_ready": 1, "reads_late": 3, "window_bytes": 0, "hedged": 0}}
    assert cli_status.cache_lines(few) == [], "four reads say nothing"


def test_without_a_daemon_the_exit_code_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sidecar", "status", "--socket", str(tmp_path / "none")]) == 2
    assert "headrace sidecar run" in capsys.readouterr().err


def test_watch_goes_on_until_it_is_interrupted(daemon: RunningDaemon) -> None:
    run = "import sys; from headrace.dataio.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "sidecar", "status", "--socket", str(daemon.socket), "--watch"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        seen = b""

        def twice() -> bool:
            nonlocal seen
            seen += process.stdout.read() or b""  # type: ignore[union-attr]  # it is a pipe
            return seen.count(f"process {daemon.pid}".encode()) >= 2

        wait_for(twice)
        process.send_signal(signal.SIGINT)
        assert process.wait(150) == 130


def test_the_service_manager_hears_that_it_is_ready_and_alive() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="mr-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        path = f"{folder}/notify"
        manager.bind(path)
        manager.settimeout(20)
        assert notify("READY=1", {"NOTIFY_SOCKET": path})
        assert manager.recv(100) == b"READY=1"

        async def alive() -> list[bytes]:
            ready({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())})
            loop = asyncio.get_running_loop()
            return [await loop.run_in_executor(None, manager.recv, 100) for _ in range(4)]

        assert asyncio.run(alive()) == [b"READY=1"] + 3 * [b"WATCHDOG=1"]
        assert not notify("READY=1", {"NOTIFY_SOCKET": f"{folder}/absent"})
    assert not notify("READY=1", {})


def test_the_command_says_ready_once_it_serves() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="mr-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(f"{folder}/notify")
        manager.settimeout(30)
        command = [
            "sidecar",
            "run",
            "--socket",
            f"{folder}/s/sidecar.sock",
            "--cache-dir",
            f"{folder}/c",
            "--cache-bytes",
            "16MiB",
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from headrace.dataio.cli import main; sys.exit(main())", *command],
            env={**os.environ, "NOTIFY_SOCKET": f"{folder}/notify", "WATCHDOG_USEC": "200000", "WATCHDOG_PID": ""},
            stderr=subprocess.DEVNULL,
        )
        assert manager.recv(100) == b"READY=1"
        assert Path(folder, "s/sidecar.sock").exists()
        assert manager.recv(100) == b"WATCHDOG=1"
        process.terminate()
        assert process.wait(150) == 0


def test_a_daemon_that_may_not_be_asked_is_not_said_to_be_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    with denied(tmp_path / "run"):
        assert main(["sidecar", "status", "--socket", str(tmp_path / "run" / "sidecar.sock")]) == 2
    assert "sidecar.sock: Permission denied" in capsys.readouterr().err
