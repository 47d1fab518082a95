"""Spans in event logs, and traces made of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.cli import main
from headrace.dataio.core import cli_trace
from headrace.dataio.core.tracing import HEADER, PROFILERS, EventLog, Tracer

NO_NVTX = {"NVTX_DISABLE": "1"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_events_and_nvtx_a_span_is_nothing() -> None:
    tracer = Tracer(NO_NVTX)
    assert tracer.span("a", {}) is tracer.span("b", {})


def test_a_span_is_one_line_also_when_it_ends_in_an_error(tmp_path: Path) -> None:
    tracer = Tracer({**NO_NVTX, "HEADRACE_EVENTS": str(tmp_path), "RANK": "3"})
    with tracer.span("loader.wait", {"batch": 7}):
        pass
    with pytest.raises(ValueError, match="inside"), tracer.span("decode", {}):
        raise ValueError("inside")
    header, first, second = lines(tmp_path / f"rank-3-{os.getpid()}.jsonl")
    assert (header[HEADER], header["rank"], header["pid"]) == (1, 3, os.getpid())
    assert (first["name"], first["args"], first["tid"]) == ("loader.wait", {"batch": 7}, threading.get_native_id())
    assert second["name"] == "decode"
    assert second["ts"] >= first["ts"] > 1.6e15


def test_ranges_are_pushed_and_popped_where_nvtx_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = pytest.importorskip("nvtx", reason="the package nvtx is not here")
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(nvtx, "push_range", lambda name, domain: seen.append(("push", name, domain)))
    monkeypatch.setattr(nvtx, "pop_range", lambda domain: seen.append(("pop", domain)))
    with Tracer({}).span("commit", {}):
        seen.append(("inside",))
    assert seen == [("push", "commit", "headrace"), ("inside",), ("pop", "headrace")]


def test_nvtx_is_imported_only_under_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvtx", reason="the package nvtx is not here")
    monkeypatch.delitem(sys.modules, "nvtx")
    tracer = Tracer({})
    assert tracer.span("a", {}) is tracer.span("b", {})
    assert "nvtx" not in sys.modules
    for profiler in PROFILERS:
        with Tracer({profiler: "1", **NO_NVTX}).span("a", {}):
            assert "nvtx" not in sys.modules
    with Tracer({PROFILERS[0]: "1"}).span("a", {}):
        assert "nvtx" in sys.modules


def test_the_log_of_a_process_is_bounded(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path), "0", file_bytes=2000)
    for n in range(200):
        log.write("span", float(n), 0.5, {"n": n})
    newest, before = log.path, Path(f"{log.path}.1")
    assert sorted(tmp_path.iterdir()) == [newest, before]
    assert newest.stat().st_size <= 2000
    assert before.stat().st_size <= 2000
    assert lines(newest)[-1]["args"]["n"] == 199
    assert HEADER in lines(newest)[0]
    assert HEADER in lines(before)[0]


def test_a_log_that_cannot_be_written_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(str(tmp_path / "file"))
    log.write("a", 0.0, 0.0, {})
    log.write("b", 0.0, 0.0, {})
    assert (tmp_path / "file").read_text() == ""


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    code = (
        "import os\nfrom headrace.dataio.core.tracing import span\n"
        "with span('parent'): pass\n"
        "if os.fork() == 0:\n    with span('child'): pass\n    os._exit(0)\nos.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HEADRACE_EVENTS": str(tmp_path)})
    names = [[event.get("name") for event in lines(path)] for path in tmp_path.iterdir()]
    assert sorted(names) == [[None, "child"], [None, "parent"]]


def test_logs_of_ranks_become_one_chrome_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "events"
    for rank in range(3):
        log = EventLog(str(folder), str(rank))
        log.write("loader.wait", 10.0 + rank, 0.25, {"batch": rank})
        log.write("stage.d2h", 11.0 + rank, 0.5, {})
        log.path.rename(folder / f"rank-{rank}-copied.jsonl")
        text = (folder / f"rank-{rank}-copied.jsonl").read_text().replace(f'"pid": {os.getpid()}', f'"pid": {rank + 1}')
        (folder / f"rank-{rank}-copied.jsonl").write_text(text)
    assert main(["trace", str(folder), "-o", str(tmp_path / "trace.json")]) == 0
    assert "6 events of 3 processes" in capsys.readouterr().out
    check_chrome(json.loads((tmp_path / "trace.json").read_text()), events=6, processes=3)


def test_the_time_of_a_trainer_is_told_apart_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(str(tmp_path / "events"), "3")
    log.write("decode", 9.0, 30.0, {})
    log.write("loader.wait", 10.0, 1.0, {"batch": 0})
    log.write("save", 14.0, 0.5, {"step": 1})
    log.write("loader.wait", 19.0, 1.0, {"batch": 1})
    before = sorted(tmp_path.rglob("*"))
    assert main(["trace", str(tmp_path / "events"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["processes"]
    assert (found["rank"], found["pid"], found["seconds"]) == (3, os.getpid(), 10.0)
    assert (found["data_wait"], found["save_stall"]) == (0.2, 0.05)
    assert found["goodput"] == pytest.approx(0.75)
    assert found["spans"]["loader.wait"] == {"count": 2, "seconds": 2.0, "longest_seconds": 1.0}
    assert main(["trace", str(tmp_path / "events")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["3", str(os.getpid()), "on", socket.gethostname(), "10.0", "20.0%", "5.0%", "75.0%"] in lines
    assert [line[:5] for line in lines if line[:1] == ["decode"]] == [["decode", "1", "30.00", "30000.00", "30000.0"]]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_log_that_somebody_else_wrote_shows_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = {HEADER: 1, "rank": "seven", "pid": -1, "host": "\x1b[31mnode"}
    events: list[dict[str, object]] = [{"name": "\x1b]0;title\x07", "ts": 1, "dur": 1, "tid": 1}]
    events.append({"name": "far", "ts": 10**400, "dur": 1, "tid": 1})
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [header, *events])))
    assert main(["trace", str(tmp_path / "x.jsonl")]) == 1
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "?[31mnode" in shown.out
    assert "skipped 1 lines" in shown.err


def test_logs_of_too_many_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_trace, "PROCESSES", 2)
    for count, code in ((2, 0), (3, 2)):
        (tmp_path / "x.jsonl").write_text("".join(json.dumps({HEADER: 1, "pid": n}) + "\n" for n in range(count)))
        assert main(["trace", str(tmp_path / "x.jsonl")]) == code


def check_chrome(trace: dict[str, Any], events: int, processes: int) -> None:
    """What Chrome's trace event format asks of complete and metadata events."""
    found = trace["traceEvents"]
    complete = [event for event in found if event["ph"] == "X"]
    names = [event for event in found if event["ph"] == "M" and event["name"] == "process_name"]
    assert len(complete) == events
    assert len(names) == processes == len({event["pid"] for event in complete})
    assert {event["ph"] for event in found} <= {"X", "M"}
    for event in complete:
        assert isinstance(event["name"], str)
        assert isinstance(event["cat"], str)
        assert all(isinstance(event[field], int) and event[field] >= 0 for field in ("ts", "dur", "pid", "tid"))
        assert isinstance(event["args"], dict)
    assert trace["displayTimeUnit"] in ("ms", "ns")


def test_half_a_line_of_a_killed_process_is_skipped_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(str(tmp_path))
    log.write("a", 1.0, 1.0, {})
    with open(log.path, "ab") as file:
        file.write(b'{"name": "b", "ts": -1, "dur": 1, "tid": 1}\n[1]\n{"name": "c", "ts"')
    assert main(["trace", str(log.path), "-o", str(tmp_path / "t.json")]) == 1
    assert "skipped 3 lines" in capsys.readouterr().err
    check_chrome(json.loads((tmp_path / "t.json").read_text()), events=1, processes=1)


def test_what_is_no_event_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"name": "a"}\n')
    assert main(["trace", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "t.json")]) == 2
    assert main(["trace", str(tmp_path / "nothing"), "-o", str(tmp_path / "t.json")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty"), "-o", str(tmp_path / "t.json")]) == 2
    assert not (tmp_path / "t.json").exists()
