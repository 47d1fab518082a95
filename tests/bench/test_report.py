"""Tables of results: every figure, every error and every incomplete part is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.core.report import markdown, report
from headrace.bench.core.results import Metric, Part, Run, Samples, write
from headrace.bench.workloads.store import Sweep
from headrace.dataio.core.errors import UsageError


def swept() -> Part:
    sweep = Sweep(("get", "list"), (4096, 1 << 20), (1, 4, 16))
    part = Part("store", "Store", metrics=sweep.metrics(), against="s3fs")
    for number, name in enumerate(("headrace", "s3fs")):
        found = part.candidates[name] = Samples()
        for cell in sweep.cells():
            rate = 100.0 * (2 - number) * cell.width**0.5
            found.metrics[cell.name] = [rate * 0.9, rate, rate * 1.2]
            for share in ("p50", "p99", "p999"):
                found.metrics[f"{cell.name}_{share}"] = [2.0 * cell.width]
    return part


def compared() -> Part:
    about = {
        "mb_s": Metric("MB/s", "MB/s", "higher", limit=2000, limit_why="memcpy in the same run"),
        "stall": Metric("stall", "s", goal=0.2),
    }
    found = {
        "headrace": Samples({"mb_s": [1000.0, 1100.0, 1300.0], "stall": [0.1, 0.15, 0.12]}),
        "peer": Samples({"mb_s": [500.0, 550.0]}, errors=["ran out of memory"]),
    }
    return Part("checkpoint", "Checkpoints", metrics=about, candidates=found, against="peer", notes=["a note"])


def one_run() -> Run:
    alone = Part(
        "sidecar", metrics={"open": Metric("Open, µs", "µs", goal=60)}, candidates={"ours": Samples({"open": [70.0]})}
    )
    cut = Part("loader", status="interrupted", why="interrupted by the user")
    machine = {"cpu": "abacus", "cpus": 2, "file_system": "ext4", "load_before": 0.1, "packages": {"torch": "2"}}
    return Run(["headrace", "bench", "all"], "2026-11-21T10:00:00+00:00", machine, [swept(), compared(), alone, cut])


def test_every_figure_and_every_incomplete_part_is_in_the_tables() -> None:
    text = markdown([one_run()])
    assert text.startswith(
        "- **checkpoint** in part: peer: ran out of memory\n- **loader** interrupted: interrupted by"
    )
    assert "| headrace | 1,100 (1,000–1,300) | 0.12 (0.1–0.15) |" in text
    assert "| peer | 525 (500–550) | – |" in text
    assert "| headrace ÷ peer | 2.10 | – |" in text
    assert "| Open, µs | ≤ 60 | 70 ✗ |" in text
    assert "\na note" in text
    assert "peer failed: ran out of memory" in text


def test_the_command_prints_the_chosen_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(one_run(), tmp_path / "a.json")
    assert report([str(tmp_path / "a.json"), "--part", "checkpoint"]) == 0
    printed = capsys.readouterr().out
    assert "`headrace bench all`, 3 rounds, 2 cores of abacus, ext4, load 0.1, 2026-11-21." in printed
    assert "### Store" not in printed
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(UsageError, match=r"b\.json"):
        report([str(tmp_path / "b.json")])


def test_a_sweep_becomes_a_table_for_each_operation_and_the_command_says_not_where_it_wrote() -> None:
    run = one_run()
    run.command += ["-o", "/somewhere/it.json", "--rounds", "3"]
    text = markdown([run], ["store"])
    assert "`headrace bench all --rounds 3`" in text
    assert "**get, MB/s**\n\n| | 4.0 KiB ×1 | 4.0 KiB ×4 | 4.0 KiB ×16 | 1.0 MiB ×1 |" in text
    assert "**list, keys/s**\n\n| | ×1 | ×4 | ×16 |" in text
