"""`headrace bench all`: whatever was asked for is in the report, with what became of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.bench.cli import COMMANDS, bench, usage
from headrace.bench.core.results import Run, read
from headrace.bench.workloads import all as all_module
from headrace.bench.workloads.all import PLAN, PlannedRun, run, time_limit
from headrace.dataio.core.errors import UsageError


def document() -> Run:
    return Run(["test"], "2026-01-01", {})


def test_done_failed_cut_off_and_skipped_parts_are_all_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_module, "GRACE_SECONDS", 30.0)
    (tmp_path / "data").mkdir()
    endless = (
        "store",
        str(tmp_path / "data"),
        "--sizes",
        "4KiB",
        "--operations",
        "get",
        "--rounds",
        "9999",
        "--duration",
        "1e6",
    )
    plan = [
        PlannedRun("simulate", ("simulate", "--gpus", "8", "--rounds", "1"), 300),
        PlannedRun("broken", ("store", "gs://nowhere"), 300),
        PlannedRun("endless", endless, 8),
        PlannedRun("late", ("simulate",), 0.5),
    ]
    monkeypatch.setattr(all_module, "time_limit", lambda need, left, later: need)
    parts = {part.name: part for part in run(plan, tmp_path, 1000, document())}
    assert parts["simulate"].status == "done"
    assert (parts["broken"].status, "neither a bucket nor a directory" in parts["broken"].why) == ("failed", True)
    assert parts["endless"].status == "interrupted"
    assert "stopped after its time limit" in parts["endless"].why
    assert parts["endless"].candidates["headrace"].metrics, "its measurements were lost"
    assert (parts["late"].status, parts["late"].why) == ("skipped", "no time was left; --minutes gives more")
    assert [part.name for part in read(tmp_path / "bench.json").parts] == ["simulate", "broken", "endless", "late"]
    text = (tmp_path / "report.md").read_text()
    for name, state in (("broken", "failed"), ("endless", "interrupted"), ("late", "skipped")):
        assert f"- **{name}** {state}: " in text
    assert not list((tmp_path / "data").iterdir())


def test_a_benchmark_may_take_what_the_later_ones_do_not_need_and_else_its_share() -> None:
    assert time_limit(20, 300, 250) == 50
    assert time_limit(20, 300, 0) == 300
    assert time_limit(20, 90, 160) == 10
    assert time_limit(20, -5, 160) < 1
    assert sum(short.need for short in PLAN) <= 280, "no room is left in the five minutes"


def test_ctrl_c_ends_it_and_lists_the_benchmarks_that_were_not_started(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "bench",
        "all",
        "--only",
        "directory,simulate",
        "-o",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (tmp_path / "directory.log").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 130, out + err
    first, second = read(tmp_path / "bench.json").parts
    assert (first.name, first.status) == ("directory", "interrupted")
    assert (second.status, second.why) == ("skipped", "interrupted before it was started")


def test_the_plan_names_every_benchmark_that_measures() -> None:
    assert {short.command[0] for short in PLAN} >= {
        "store",
        "pack",
        "loader",
        "checkpoint",
        "sidecar",
        "simulate",
    }
    assert {short.command[0] for short in PLAN} <= set(COMMANDS)
    with pytest.raises(UsageError, match="no benchmark 'guess' in the plan"):
        all_module.all_(["--only", "guess"])


def test_help_is_there_at_once_and_a_wrong_name_is_wrong_use() -> None:
    assert bench(["--help"]) == 0
    assert bench([]) == 2
    with pytest.raises(UsageError, match="no benchmark 'guess'"):
        bench(["guess"])
    assert all(name in usage() for name in COMMANDS)
    code = "import sys, headrace.bench.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_benchmark_has_help_with_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench([name, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: headrace bench {name}" in printed
    assert "exit codes:" in printed
