"""Metadata, descriptions and artifacts, from `save` to the commands that show them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer, Keep, attachments, read, read_artifact, recording
from headrace.checkpoint import artifacts as reading
from headrace.checkpoint.format.metadata import STALL, Metadata
from headrace.checkpoint.repository import check, collect, descriptions, survey
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.cli import main
from headrace.dataio.core.errors import CapacityError, ConflictError, CorruptionError, NotFoundError, UsageError
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, Wrapped, begin, flip, make, save, tiny_state
from tests.support.ranks import launch

SECONDS = 60


def open_at(where: Any, run: str = "exp", **options: Any) -> Checkpointer:
    return Checkpointer(where, run=run, sidecar=None, **options)


def lines_of(where: Path) -> dict[int, survey.StepLine]:
    with open_store(str(where)) as store:
        return {line.step: line for line in survey.survey(store).steps}


# metadata


def test_metadata_is_committed_with_the_step(tmp_path: Path) -> None:
    given: Metadata = {
        "loss": 2.1,
        "tokens": 10**9,
        "note": "warm-up done",
        "broken": math.nan,
        "done": False,
        "gap": None,
    }
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"epoch": 1}, metadata=given).result(SECONDS)
        checkpointer.save(2, {"epoch": 2}).result(SECONDS)
    found = lines_of(tmp_path)
    assert repr(found[1].metadata) == repr(given)
    assert found[2].metadata == {}
    assert 0 < found[1].seconds < SECONDS
    with read(tmp_path, run="exp", step=1) as saved:
        assert repr(saved.metadata) == repr(given)


def test_metadata_that_cannot_be_stored_fails_before_the_copy_and_the_step_can_be_saved(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        with pytest.raises(UsageError, match=r"value\.item\(\)"):
            checkpointer.save(1, {"epoch": 1}, metadata={"loss": torch.tensor(1.0)})  # type: ignore[dict-item]
        checkpointer.save(1, {"epoch": 1}, metadata={"loss": 1.0}).result(SECONDS)
    assert lines_of(tmp_path)[1].metadata == {"loss": 1.0}


def test_a_change_of_the_mapping_after_save_changes_nothing(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        metadata: dict[str, Any] = {"loss": 1.0}
        handle = checkpointer.save(1, {"epoch": 1}, metadata=metadata)
        metadata["loss"] = 2.0
        handle.result(SECONDS)
    assert lines_of(tmp_path)[1].metadata == {"loss": 1.0}


@pytest.mark.parametrize("record", [True, False])
def test_the_stall_is_recorded_apart_from_what_the_user_gave(record: bool, tmp_path: Path) -> None:
    full: Metadata = {f"entry {number}": number for number in range(64)}
    with open_at(tmp_path, record=record) as checkpointer:
        first = checkpointer.save(1, {"epoch": 1}, metadata={"loss": 1.0}).result(SECONDS)
        checkpointer.save(2, {"epoch": 2}, metadata=full).result(SECONDS)
        with pytest.raises(UsageError, match="recorded by Headrace itself"):
            checkpointer.save(3, {"epoch": 3}, metadata={STALL: 1.0})
    found = lines_of(tmp_path)
    assert found[1].stall == (first.stall if record else None)
    assert (found[1].metadata, found[2].metadata) == ({"loss": 1.0}, full)
    assert found[2].stall is None  # there was no room for it


def test_only_the_metadata_of_rank_0_counts_whichever_rank_decides(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        number = begin(store)
        made = [
            make(
                store,
                {f"w{rank}": bytes([rank]) * 99},
                step=1,
                number=number,
                attempt="01J" + "0" * 23,
                rank=rank,
                world_size=2,
                metadata={"rank": rank},
            )
            for rank in (0, 1)
        ]
        ranks = [threading.Thread(target=save, args=(store, each)) for each in made]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        (line,) = survey.survey(store).steps
        assert line.metadata == {"rank": 0}


class Counting(Wrapped):
    """Counts requests by what they do."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    def get(self, key: str, **options: Any) -> bytes:
        self.keys.append(key)
        return bytes(self.inner.get(key, **options))


def test_a_listing_with_metadata_reads_no_manifest(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {"epoch": step}, metadata={"loss": 1 / step}).result(SECONDS)
    with open_store(str(tmp_path)) as store:
        counting = Counting(store)
        assert [line.metadata["loss"] for line in survey.survey(counting).steps] == [1 / step for step in range(1, 6)]
        assert [line.step for line in survey.newest_first(counting, "exp")] == [5, 4, 3, 2, 1]
        assert not [key for key in counting.keys if key.endswith(".manifest")]


def test_steps_without_the_new_fields_are_listed(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "0.1" / "repository"
    with open_store(str(golden)) as store:
        found = list(survey.newest_first(store, "pretrain"))
        assert [line.step for line in found] == [40, 30, 20, 10]
        assert all(line.metadata == {} and line.description == "" for line in found)


def test_the_best_steps_stay_while_training(tmp_path: Path) -> None:
    with open_at(tmp_path, keep=Keep(last=1, best=("loss", 2, "min"))) as checkpointer:
        for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0], 1):
            checkpointer.save(step, {"w": torch.arange(9.0) * step}, metadata={"loss": loss}).result(SECONDS)
    assert sorted(lines_of(tmp_path)) == [2, 3, 5]


# descriptions


def test_a_description_is_stored_once_and_once_after_a_change(tmp_path: Path) -> None:
    with open_at(tmp_path, record=False) as checkpointer:
        checkpointer.describe(config={"lr": 1e-3, "betas": (0.9, 0.95)}, code="abc")
        for step in (1, 2):
            checkpointer.save(step, {"epoch": step}).result(SECONDS)
        checkpointer.describe(config={"lr": 1e-4}, code=None)
        checkpointer.save(3, {"epoch": 3}).result(SECONDS)
    with open_at(tmp_path, record=False) as checkpointer:
        checkpointer.save(4, {"epoch": 4}).result(SECONDS)
    found = lines_of(tmp_path)
    assert found[1].description == found[2].description != found[3].description
    assert found[4].description == ""
    assert len(list((tmp_path / "runs" / "exp" / "descriptions").iterdir())) == 2
    with read(tmp_path, run="exp", step=2) as saved:
        assert saved.description == {"config": {"lr": 1e-3, "betas": [0.9, 0.95]}, "code": "abc"}
    with read(tmp_path, run="exp", step=3) as saved:
        assert saved.description == {"config": {"lr": 1e-4}}


def test_what_is_recorded_is_on_a_short_list(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(1, {"epoch": 1}).result(SECONDS)
    with read(tmp_path, run="exp") as saved:
        recorded = saved.description["recorded"]
    allowed = {"script", "arguments", "python", "torch", "headrace", "world_size", "git"}
    assert recorded.keys() <= allowed
    assert recorded["torch"] == torch.__version__
    assert "/" not in recorded["script"]


def test_arguments_and_configurations_lose_their_secrets() -> None:
    arguments = [
        "--lr=0.1",
        "--api-key=abc",
        "--token",
        "xyz",
        "s3://user:pw@host/b",
        "--tokenizer",
        "gpt2",
        "-v",
        "\udc80",
    ]
    assert recording.redact_arguments(arguments) == [
        "--lr=0.1",
        "--api-key=***",
        "--token",
        "***",
        "s3://***@host/b",
        "--tokenizer",
        "gpt2",
        "-v",
        "?",
    ]
    config = {"max_tokens": 5, "hf_token": "x", "tokenizer": "gpt2", "db": {"password": "y"}, "urls": ["https://u:p@h"]}
    assert recording.without_secrets(config) == {
        "max_tokens": 5,
        "hf_token": "***",
        "tokenizer": "gpt2",
        "db": {"password": "***"},
        "urls": ["https://***@h"],
    }


def test_a_description_that_cannot_be_stored_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with open_at(tmp_path, record=False) as checkpointer:
        checkpointer.describe(config={"lr": 1}, api_key="x")
        for bad in ({"config": object()}, {"recorded": 1}, {"version": 1}, {"big": "x" * 300_000}):
            with pytest.raises(UsageError):
                checkpointer.describe(**bad)
        checkpointer.save(1, {"epoch": 1}).result(SECONDS)
    with read(tmp_path, run="exp") as saved:
        assert saved.description == {"config": {"lr": 1}, "api_key": "***"}


@pytest.fixture
def git_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("pass\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_the_commit_and_changes_of_the_script_s_folder_are_recorded(git_folder: Path) -> None:
    first = recording.git_facts(git_folder)
    assert len(str(first["commit"])) == 40
    assert first["dirty"] is False
    (git_folder / "train.py").write_text("print()\n")
    assert recording.git_facts(git_folder) == {**first, "dirty": True}
    assert recording.git_facts(git_folder.parent) == {}


def test_git_starts_no_program_of_the_repository(git_folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o700)
    for name in ("core.fsmonitor", "core.pager", "diff.external", "core.sshCommand"):
        subprocess.run(["git", "config", name, str(program)], cwd=git_folder, check=True)
    (git_folder / "train.py").write_text("print()\n")
    assert recording.git_facts(git_folder)["dirty"] is True
    assert not mark.exists()


def test_a_git_that_hangs_does_not_hold_the_save_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git_folder: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "bin" / "git").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(recording, "GIT_SECONDS", 0.2)
    assert recording.git_facts(git_folder) == {}


def test_an_urgent_first_save_does_not_wait_for_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(recording, "git_facts", lambda folder: calls.append(folder) or {})
    with open_at(tmp_path) as checkpointer:
        checkpointer.describe(config={"lr": 1})
        checkpointer.save(1, {"epoch": 1}, priority="preemption").result(SECONDS)
        assert not calls
        checkpointer.save(2, {"epoch": 2}).result(SECONDS)
        checkpointer.save(3, {"epoch": 3}).result(SECONDS)
    assert len(calls) == 1
    found = lines_of(tmp_path)
    assert found[1].description != found[2].description == found[3].description


def test_a_missing_description_is_none_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    with open_at(tmp_path, record=False) as checkpointer:
        checkpointer.describe(config={"lr": 1})
        checkpointer.save(1, {"epoch": 1}).result(SECONDS)
    (path,) = (tmp_path / "runs" / "exp" / "descriptions").iterdir()
    flip(path, 20)
    with open_store(str(tmp_path)) as store:
        (problem,) = check.check(store, data=False).problems
        assert (problem.object, problem.hits) == (f"runs/exp/descriptions/{path.name}", ("exp/1/1",))
        with pytest.raises(CorruptionError, match="its digest differs"):
            descriptions.read(store, "exp", path.stem)
        path.unlink()
        (problem,) = check.check(store).problems
        assert problem.what == "it is missing"
        assert descriptions.read(store, "exp", path.stem) is None
        assert check.describe(store, "exp", "1").description is None


# artifacts


def test_artifacts_are_stored_with_the_step_and_restore_ignores_them(tmp_path: Path) -> None:
    sample = tmp_path / "sample.png"
    sample.write_bytes(bytes(range(256)) * 700)
    state: dict[str, Any] = {"w": torch.arange(9.0), "epoch": 1}
    with open_at(tmp_path / "ck") as checkpointer:
        assert checkpointer.put_artifact(1, "samples/0.png", sample) == 179_200
        checkpointer.put_artifact(1, "config.yaml", b"lr: 0.001")
        checkpointer.put_artifact(1, "empty", b"")
        sample.write_bytes(b"changed")
        checkpointer.save(1, state).result(SECONDS)
        checkpointer.save(2, state).result(SECONDS)
        state["w"].zero_()
        assert checkpointer.restore(state, 1) == 1
        assert state["w"].tolist() == list(range(9))
    where = str(tmp_path / "ck")
    assert read_artifact(where, run="exp", step=1, name="samples/0.png") == bytes(range(256)) * 700
    assert read_artifact(where, run="exp", step=1, name="empty") == b""
    with read(where, run="exp", step=1) as saved:
        assert sorted(saved) == ["epoch", "w"]
    with pytest.raises(NotFoundError, match=r"has no artifact 'config\.yaml'"):
        read_artifact(where, run="exp", step=2, name="config.yaml")
    with open_store(where) as store:
        assert check.check(store).clean


def test_an_artifact_that_two_steps_have_is_stored_once_and_goes_with_the_last_step(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (300_000,), dtype=torch.uint8).numpy().tobytes()
    results = []
    with open_at(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            if step < 3:
                checkpointer.put_artifact(step, "vocabulary", data)
            results.append(checkpointer.save(step, {"epoch": step}).result(SECONDS))
    assert [result.bytes_written >= 300_000 for result in results] == [True, False, False]
    with open_store(str(tmp_path)) as store:
        collect.retain(store, "exp", Keep(last=2))
        assert read_artifact(store, run="exp", step=2, name="vocabulary") == data
        collect.retain(store, "exp", Keep(last=1))
        assert not [info for info in store.list("packs/") if info.size > 300_000]
        assert check.check(store).clean


def test_a_large_artifact_is_written_to_a_file_in_pieces(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (9_500_000,), dtype=torch.uint8).numpy().tobytes()
    with open_at(tmp_path / "ck", staging_bytes=64 << 20) as checkpointer:
        checkpointer.put_artifact(1, "archive.tar", data)
        checkpointer.save(1, {"epoch": 1}).result(SECONDS)
    with open_store(str(tmp_path / "ck")) as store, reading.open_leased(store, "exp", "latest") as step:
        assert reading.save_as(store, step, "archive.tar", tmp_path / "out") == len(data)
    assert (tmp_path / "out").read_bytes() == data
    assert not list(tmp_path.glob("out.part*"))


@pytest.mark.parametrize("staging_bytes", [None, 64 << 20])
def test_a_large_file_passes_through_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging_bytes: int | None
) -> None:
    """A sparse file of 400 MiB. A change after `put_artifact` changes nothing."""
    source, size = tmp_path / "large", 400 << 20
    with open(source, "wb") as file:
        for at, part in ((5 << 20, b"first"), (size - 4, b"last")):
            file.seek(at)
            file.write(part)
    state: dict[str, Any] = {"w": torch.arange(1_000_000.0), "epoch": 1}
    limits = attachments.Limits(memory_bytes=1 << 20)
    monkeypatch.setattr(attachments, "Limits", lambda: limits)
    with open_at(tmp_path / "ck", staging_bytes=staging_bytes) as checkpointer, at_most_resident(128 << 20):
        assert checkpointer.put_artifact(1, "large", source) == size
        checkpointer.put_artifact(1, "note", b"small")
        with open(source, "r+b") as file:
            file.write(b"changed")
        result = checkpointer.save(1, state).result(SECONDS)
        assert (result.bytes_state, result.committed_by) == (size + 4_000_005, "process")
        assert result.bytes_written < 16 << 20  # the zeros are one chunk
        checkpointer.put_artifact(2, "large", source)
        assert checkpointer.save(2, state | {"epoch": 2}).result(SECONDS).bytes_written < 8 << 20
        with open_store(str(tmp_path / "ck")) as store, reading.open_leased(store, "exp", 1) as step:
            assert reading.save_as(store, step, "large", tmp_path / "out") == size
            assert reading.read_bytes(store, step, "note") == b"small"
        state["w"].zero_()
        assert checkpointer.restore(state, 1) == 1
    assert torch.equal(state["w"], torch.arange(1_000_000.0))
    with open(tmp_path / "out", "rb") as file:
        assert (file.read(7), file.seek(5 << 20), file.read(6)) == (bytes(7), 5 << 20, b"first\0")
        assert (file.seek(size - 4), file.read()) == (size - 4, b"last")


@contextlib.contextmanager
def at_most_resident(more: int) -> Iterator[None]:
    """Assert that this process never needs `more` bytes of memory in addition to what it has."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    yield
    assert resident("VmHWM") - before < more


def resident(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) << 10


def test_a_damaged_artifact_is_never_returned(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.put_artifact(1, "log", b"x" * 100_000)
        checkpointer.save(1, {"epoch": 1}).result(SECONDS)
    (pack,) = (tmp_path / "packs").rglob("*.pack")
    flip(pack, 5000)
    with pytest.raises(CorruptionError, match=r"headrace\.artifact/log"):
        read_artifact(tmp_path, run="exp", name="log")
    with open_store(str(tmp_path)) as store:
        (problem,) = check.check(store).problems
        assert problem.hits == ("exp/1/1: headrace.artifact/log",)


def test_refused_artifacts_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = attachments.Limits(count=2, memory_bytes=1000, file_bytes=100_000)
    monkeypatch.setattr(attachments, "Limits", lambda: limits)
    with open_at(tmp_path / "ck") as checkpointer:
        checkpointer.put_artifact(1, "a", b"x" * 600)
        with pytest.raises(ConflictError):
            checkpointer.put_artifact(1, "a", b"y")
        with pytest.raises(CapacityError, match=r"400 B are left of the 1000 B .* in memory"):
            checkpointer.put_artifact(1, "b", b"x" * 600)
        (tmp_path / "large").write_bytes(bytes(100_001))
        with pytest.raises(CapacityError, match=r"97.7 KiB are left of the 97.7 KiB .* on disk"):
            checkpointer.put_artifact(1, "b", tmp_path / "large")
        with pytest.raises(NotFoundError):
            checkpointer.put_artifact(1, "b", tmp_path / "missing")
        with pytest.raises(UsageError, match="Is a directory"):
            checkpointer.put_artifact(1, "b", tmp_path)
        with pytest.raises(UsageError, match="type int"):
            checkpointer.put_artifact(1, "b", 3)  # type: ignore[arg-type]
        checkpointer.put_artifact(1, "b", b"")
        with pytest.raises(CapacityError, match="2 artifacts wait for step 1"):
            checkpointer.put_artifact(1, "c", b"")
        checkpointer.save(1, {"epoch": 1}).result(SECONDS)
        checkpointer.put_artifact(2, "c", b"")
    assert read_artifact(tmp_path / "ck", run="exp", name="a") == b"x" * 600


def test_artifacts_of_steps_that_are_not_saved_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_at(tmp_path) as checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.put_artifact(1, "a", b"1")
        checkpointer.put_artifact(3, "a", b"3")
        checkpointer.save(2, {"epoch": 2}).result(SECONDS)
        checkpointer.save(3, {"epoch": 3}).result(SECONDS)
    assert "the artifacts of steps 1 are dropped" in caplog.text
    assert read_artifact(tmp_path, run="exp", name="a") == b"3"


def test_a_state_with_the_reserved_name_and_artifacts_is_refused(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.put_artifact(1, "x", b"1")
        with pytest.raises(UsageError, match="reserved name"):
            checkpointer.save(1, {"headrace.artifact": {"x": torch.zeros(3)}})


def test_a_file_that_changes_while_it_is_read_is_stored_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows and shrinks between the look at its size and the reading. The last is on disk first, and then small."""
    path, require_room = tmp_path / "log", attachments.Attachments._require_room
    for before, change, expected in ((1000, 2000, 1000), (1000, 10, 10), (80_000, 90_000, 80_000), (80_000, 10, 10)):
        path.write_bytes(b"x" * before)

        def changed(*arguments: Any, change: int = change, **options: Any) -> bool:
            path.write_bytes(b"x" * change)
            return require_room(*arguments, **options)

        monkeypatch.setattr(attachments.Attachments, "_require_room", changed)
        waiting = attachments.Attachments(attachments.Limits(memory_bytes=70_000))
        assert waiting.put(1, "log", path) == expected
        extras = waiting.of(1, {})
        assert [data.tobytes() for data in extras.artifacts.values()] == [b"x" * expected][: expected < 70_000]
        assert [file.nbytes for file in extras.files.values()] == [expected][: expected >= 70_000]


# commands


@pytest.fixture
def filled(tmp_path: Path) -> str:
    with open_at(tmp_path) as checkpointer:
        checkpointer.describe(config={"lr": 1e-3, "empty": {}})
        checkpointer.put_artifact(10, "log.txt", b"all good")
        for step, loss in ((10, 3.0), (20, 1.5), (30, math.nan)):
            checkpointer.save(step, {"epoch": step}, metadata={"loss": loss, "note": "a\x1b[31m"}).result(SECONDS)
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore({"epoch": 0}, 20)
        checkpointer.save(30, {"epoch": 30}, metadata={"loss": 1.0, "tokens": 10**9}).result(SECONDS)
    return str(tmp_path)


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["ckpt", *words]) == 0
    return capsys.readouterr().out


def test_ls_and_log_show_and_select_by_metadata(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "ls", filled, "--metadata", "loss,tokens")
    assert "loss 1.5  tokens -" in text
    text = output_of(capsys, "ls", filled, "--where", "loss < 2 and not tokens > 1")
    assert [line.split()[4] for line in text.splitlines()] == ["20"]
    text = output_of(capsys, "log", filled, "--run", "exp")
    assert [line.split()[1] for line in text.splitlines()] == ["30", "20", "10"]
    assert "\x1b" not in text
    found = json.loads(output_of(capsys, "log", filled, "--run", "exp", "--json", "-n", "2"))
    assert [(line["step"], line["metadata"]["loss"]) for line in found] == [(30, 1.0), (20, 1.5)]
    listed = json.loads(output_of(capsys, "ls", filled, "--json"))
    assert [line["metadata"]["loss"] for line in listed["steps"]] == [3.0, 1.5, "nan", 1.0]
    assert "no step that --where selects" in output_of(capsys, "log", filled, "--run", "exp", "--where", "step > 99")
    assert main(["ckpt", "log", filled, "--run", "exq"]) == 2
    assert main(["ckpt", "log", filled]) == 2
    assert main(["ckpt", "ls", filled, "--where", "loss <"]) == 2


def test_tree_shows_timelines_and_forks(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "tree", filled).splitlines() == [
        "exp",
        "  timeline 1: 3 steps from 10 to 30",
        "  timeline 2 from step 20 of timeline 1: step 30  (newest)",
    ]
    (tree,) = json.loads(output_of(capsys, "tree", filled, "--json"))
    assert [(node["parent"], node["fork"], node["steps"]) for node in tree["timelines"]] == [
        (None, None, [10, 20, 30]),
        (1, 20, [30]),
    ]


def test_show_has_metadata_description_and_artifacts(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "show", filled, "--run", "exp", "--step", "10")
    assert "metadata: loss = 3\n" in text
    assert "artifact: log.txt  rank 0  8 B" in text
    assert "config.lr = 0.001" in text
    shown = json.loads(output_of(capsys, "show", filled, "--run", "exp", "--step", "10", "--json"))
    assert shown["artifacts"] == [["log.txt", 0, 8]]
    assert shown["description"]["config"] == {"lr": 0.001, "empty": {}}


def test_artifacts_lists_and_fetches(filled: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    common = ("--run", "exp", "--step", "10")
    assert main(["ckpt", "artifacts", filled, *common]) == 0
    assert capsysbinary.readouterr().out == b"log.txt  rank 0  8 B\n"
    for words in ([filled, "log.txt", *common], [filled, *common, "log.txt"], [*common, filled, "log.txt", "--rank=0"]):
        assert main(["ckpt", "artifacts", *words]) == 0
        assert capsysbinary.readouterr().out == b"all good"
    assert main(["ckpt", "artifacts", filled, "log.txt", *common, "-o", str(tmp_path / "out"), "--json"]) == 0
    assert (tmp_path / "out").read_bytes() == b"all good"
    assert main(["ckpt", "artifacts", filled, "nope", *common]) == 2
    assert b"it has: log.txt" in capsysbinary.readouterr().err
    capsysbinary.readouterr()
    assert main(["ckpt", "artifacts", filled, *common[:2], "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out) == []


def test_table_has_a_row_for_each_step(filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "steps.parquet"
    assert "4 steps" in output_of(capsys, "table", filled, "-o", str(target))
    table = parquet.read_table(target)
    assert table["step"].to_pylist() == [10, 20, 30, 30]
    assert table["tokens"].to_pylist() == [None, None, None, 10**9]
    assert str(table.schema.field("time").type) == "timestamp[ms, tz=UTC]"
    assert main(["ckpt", "table", filled, "-o", str(tmp_path / "no" / "such")]) == 2


def test_table_without_pyarrow_is_one_line(filled: str) -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None; from headrace.dataio.cli import main;"
        f"sys.exit(main(['ckpt', 'table', {filled!r}, '-o', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'headrace[data]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_the_commands_run_without_torch(filled: str) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from headrace.dataio.cli import main\n"
        f"for words in (['ls', {filled!r}], ['log', {filled!r}, '--run', 'exp'], ['tree', {filled!r}],\n"
        f"              ['show', {filled!r}, '--run', 'exp'], ['artifacts', {filled!r}, '--run', 'exp']):\n"
        "    assert main(['ckpt', *words]) == 0"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_step_that_only_a_late_reader_completes_has_its_metadata(tmp_path: Path) -> None:
    from headrace.checkpoint.format import names

    with open_store(str(tmp_path)) as store:
        save(store, make(store, tiny_state(1), step=1, number=begin(store), metadata={"loss": 2.0}))
        store.delete_many([names.commit(RUN, 1, 1)])
        assert repository.find(store, RUN, "latest") is not None
        (line,) = survey.survey(store).steps
        assert line.metadata == {"loss": 2.0}


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_store_the_metadata_of_rank_0_and_artifacts_of_any_rank(tmp_path: Path, world: int) -> None:
    """Three ranks commit in groups of two."""
    launch(world, "tests.support.metadata_ranks", "save", str(tmp_path))
    found = lines_of(tmp_path)
    assert [found[step].metadata for step in (1, 2, 3)] == [{"loss": 0.5}, {"loss": 1.0}, {}]
    assert len({line.description for line in found.values()}) == 1
    ranks = [rank for rank in range(world) if rank != 1]
    with open_store(str(tmp_path)) as store:
        shown = check.describe(store, "exp", "2")
        assert [rank for _, rank, _ in shown.artifacts] == ranks
        assert shown.description is not None
        assert shown.description["recorded"]["world_size"] == world
        assert check.check(store).clean
    for rank in ranks:
        assert read_artifact(tmp_path, run="exp", step=2, name="log.txt", rank=rank) == b"rank %d" % rank
    restored = launch(world - 1, "tests.support.metadata_ranks", "restore", str(tmp_path))
    assert [lines[0]["own"] for lines in restored] == [[float(rank)] * 3 for rank in range(world - 1)]
