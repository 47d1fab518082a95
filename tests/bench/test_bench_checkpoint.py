"""`headrace bench checkpoint`: what is asked for, and how it is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.core.results import Part, Samples
from headrace.bench.workloads import checkpoint, checkpoint_worker
from headrace.bench.workloads.checkpoint import ENTRIES, OURS, SHORT, Entry, reason_against
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.open import open_store


@pytest.mark.parametrize("name", ["checkpoint", "loader"])
def test_help_imports_nothing_heavy(name: str) -> None:
    program = (
        "import sys\nfrom headrace.dataio.cli import main\n"
        f"try: main(['bench', {name!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "print([n for n in ('torch', 'av', 'pyarrow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert f"usage: headrace bench {name}" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_candidate_that_cannot_run_says_why() -> None:
    assert reason_against(ENTRIES[OURS], "s3", 4) is None
    assert "disk and tmpfs only" in (reason_against(ENTRIES["torch.save"], "s3", 1) or "")
    assert "several ranks" in (reason_against(ENTRIES["torch.save"], "disk", 2) or "")
    assert "no_such_package not installed" in (
        reason_against(Entry("x:y", needs=("no_such_package",)), "disk", 1) or ""
    )
    assert set(SHORT) <= set(ENTRIES)


@pytest.mark.parametrize("options", [["--on", "moon"], ["--size", "1KiB"], ["--size", "many"]], ids=" ".join)
def test_what_makes_no_sense_is_refused(options: list[str]) -> None:
    with pytest.raises(UsageError):
        checkpoint.checkpoint(options)


def test_every_place_has_a_table_with_what_was_measured_there() -> None:
    part = Part("checkpoint", settings={"on": ["disk", "s3"]}, metrics=checkpoint.METRICS)
    for place, stall in (("disk", 0.25), ("s3", 0.5)):
        for name, factor in (("headrace", 1), ("dcp.async_save", 4)):
            part.candidates[f"{place}: {name}"] = Samples({"first_stall_s": [factor * stall]})
    text = checkpoint.show(part)
    assert "### disk" in text
    assert "### s3" in text
    assert text.count("| headrace ÷ dcp.async_save | 0.25 |") == 2
    assert "restore" not in text, "no candidate measured it"


def test_all_candidates_copy_with_the_same_setting_and_the_result_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "glibc.malloc.check=0"):
        if before is None:
            monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
        else:
            monkeypatch.setenv("GLIBC_TUNABLES", before)
        with checkpoint.glibc_tunables(streaming=True) as value:
            assert "x86_non_temporal_threshold" in value
            assert os.environ["GLIBC_TUNABLES"] == value
        assert os.environ.get("GLIBC_TUNABLES") == before
        with checkpoint.glibc_tunables(streaming=False) as value:
            assert value == (before or "")


def test_a_place_is_empty_when_a_candidate_begins_so_that_what_it_writes_is_counted(store_url: str) -> None:
    where = store_url.removeprefix("file://")
    checkpoint_worker.empty(where)  # it need not be there
    for _ in range(2):
        with open_store(where) as store:
            store.put("1/a", b"abc")
        assert checkpoint_worker.stored_bytes(where) == 3
        checkpoint_worker.empty(where)
        assert checkpoint_worker.stored_bytes(where) == 0


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.s3
def test_two_ranks_save_and_restore_on_tmpfs_and_s3() -> None:
    command = [sys.executable, "-m", "headrace.dataio.cli", "bench", "checkpoint", "--size", "32MiB", "--ranks", "2"]
    only = ["--only", "headrace", "headrace, lazy", "dcp.async_save"]
    done = subprocess.run(
        [*command, "--on", "tmpfs,s3", "--rounds", "1", *only], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to another topology s" in done.stdout


def test_many_small_tensors_are_saved_and_restored(tmp_path: Path) -> None:
    figures = checkpoint_worker.measure_in_process(OURS, str(tmp_path / "checkpoints"), 8, 1, 0, False, 200)
    assert figures["state_mib"] == 200 / 1024
    assert figures["step_mib"] > 0.2, "a step changed all tensors"
    assert set(figures) <= {*checkpoint.METRICS, "wall_s"}
