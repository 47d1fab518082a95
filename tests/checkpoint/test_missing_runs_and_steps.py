"""Runs and steps that are not there: what a trainer gets, and what it is told."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import commit, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.dataio import Dataset, index, pack
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.store.open import open_store

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_STATE = {"t": torch.zeros(2)}


def at(url: Any, run: str = "exp42") -> Checkpointer:
    return Checkpointer(str(url), run=run, sidecar=None)


def saved(where: Path, *runs: str) -> None:
    for run in runs:
        with at(where, run) as checkpointer:
            checkpointer.save(1, _STATE).result(60)


def test_a_mistyped_run_is_an_error_where_a_step_is_required_and_else_a_warning(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_in = {"other", "exp42", "pretraining"}
    for run in saved_in:
        with at(store_url, run) as checkpointer:
            checkpointer.save(1, _STATE).result(60)
    with at(store_url, "exp24") as checkpointer:
        with pytest.raises(
            NotFoundError, match=r"run exp24 has no step: there is no such run at .*; there are: exp42, (other|pre)"
        ):
            checkpointer.restore(_STATE, required=True)
        with pytest.raises(
            FileNotFoundError, match=r"run exp24 has no step 1: there is no such run at .*; there are: exp42, "
        ):
            checkpointer.restore(_STATE, 1)
        with caplog.at_level(logging.WARNING):
            assert checkpointer.restore(_STATE) is None
        assert "run exp24 starts without a step: there is no such run at" in caplog.text
        assert "there are: exp42, " in caplog.text
        with pytest.raises(NotFoundError, match="run exp43 has no step: there is no such run"):
            checkpointer.restore(_STATE, run="exp43", required=True)
    with pytest.raises(NotFoundError, match=r"run exp24 has no step: there is no such run at .*; there are: exp42, "):
        read(store_url, run="exp24")


def test_an_empty_place_is_where_a_run_may_begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), at(tmp_path) as checkpointer:
        assert checkpointer.restore(_STATE) is None
        with pytest.raises(
            NotFoundError, match=r"run exp42 has no step: there is no checkpoint repository at [^,]* \("
        ):
            checkpointer.restore(_STATE, required=True)
    assert not caplog.text
    assert not list(tmp_path.iterdir())


def test_other_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abcdefghij":
        (tmp_path / name).write_text("x")
    with caplog.at_level(logging.WARNING), at(tmp_path) as checkpointer:
        assert checkpointer.restore(_STATE) is None
        with pytest.raises(
            NotFoundError, match=r"no checkpoint repository at .*, but other files: a, b, c, d, e, f, g, h, \.\.\."
        ):
            checkpointer.restore(_STATE, required=True)
    assert "run exp42 starts without a step: there is no checkpoint repository at" in caplog.text
    assert "but other files: a, b" in caplog.text


def test_a_folder_of_dcps_own_files_is_refused_in_any_case(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(2)}, checkpoint_id=tmp_path)
    for step in ("latest", 1):
        with (
            at(tmp_path) as checkpointer,
            pytest.raises(UnsupportedError, match=r"torch\.distributed\.checkpoint's own format"),
        ):
            checkpointer.restore(_STATE, step)
    with pytest.raises(UnsupportedError, match="checkpoint_id"):
        RepositoryReader(str(tmp_path), run="a").read_metadata()


def test_a_dataset_is_not_taken_for_a_repository(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    attempts: list[Callable[[Checkpointer], object]] = [
        lambda checkpointer: checkpointer.restore(_STATE),
        lambda checkpointer: checkpointer.restore(_STATE, 1),
        lambda checkpointer: checkpointer.save(1, _STATE),
        lambda checkpointer: read(tmp_path, run="exp42"),
    ]
    for attempt in attempts:
        with (
            at(tmp_path) as checkpointer,
            pytest.raises(UsageError, match="holds a dataset, not checkpoints") as caught,
        ):
            attempt(checkpointer)
        assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.json"]


def test_a_repository_is_not_taken_for_a_dataset(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", "exp42")
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(NotFoundError, match=r"no dataset at .*, but a checkpoint repository \(.*headrace ckpt ls"):
        Dataset(tmp_path / "ckpt")
    with pytest.raises(NotFoundError, match="but a checkpoint repository"):
        Dataset(tmp_path / "ckpt", 3)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="holds checkpoints, so no dataset is made there"):
        pack(tmp_path / "a.bin", tmp_path / "ckpt")
    with pytest.raises(UsageError, match="holds checkpoints, so no dataset is made there"):
        index(tmp_path / "*.tar", tmp_path / "ckpt")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_server_that_takes_no_writes_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="cannot be written to over HTTP") as caught:
        at("http://127.0.0.1:9/checkpoints")
    assert "s3://bucket/prefix" in caught.value.hint


@pytest.mark.parametrize("url", ["", "  ", "file://"])
def test_an_empty_url_is_refused_in_any_case(url: str) -> None:
    with pytest.raises(UsageError, match="path"):
        at(url)
    with pytest.raises(UsageError, match="path"):
        RepositoryReader(url, run="a").read_metadata()


def test_a_run_whose_steps_are_all_hidden_has_none(tmp_path: Path) -> None:
    saved(tmp_path, "exp42")
    with open_store(tmp_path) as store:
        number = timeline.open_timeline(store, "exp42", None)
        commit.abort(store, Attempt("exp42", number, 7, names.new_id(), 1), "its trainer started anew and failed")
    with at(tmp_path) as checkpointer:
        with pytest.raises(NotFoundError, match="run exp42 has no step yet"):
            checkpointer.restore(_STATE, required=True)
        with pytest.raises(NotFoundError, match="run exp42 has no step 1; it is in the abandoned timeline 1"):
            checkpointer.restore(_STATE, 1)


def test_a_repository_that_lost_its_document_is_damaged_and_not_empty(tmp_path: Path) -> None:
    saved(tmp_path, "exp42")
    (tmp_path / "repo.json").unlink()
    with at(tmp_path) as checkpointer:
        for step in ("latest", 2):
            with pytest.raises(CorruptionError, match=r"repo\.json is missing although there are runs"):
                checkpointer.restore(_STATE, step)


def test_names_of_other_runs_are_looked_for_among_so_many_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, *(f"r{n}" for n in range(9)))
    with open_store(tmp_path) as store:
        assert str(repository.missing(store, "r")).endswith(
            "r0, r1, r2, r3, r4, r5, r6, r7, ... (check the run's name)"
        )
        monkeypatch.setattr(repository, "_LISTED", 0)
        assert "there are no runs at" in str(repository.missing(store, "r"))


def test_the_error_goes_to_other_ranks_and_processes_whole(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        error = repository.missing(store, "r", 3)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(again), str(again), again.hint) == (type(error), str(error), error.hint)
    writer = RepositoryWriter(str(tmp_path), run="a", step=1)
    assert pickle.loads(pickle.dumps(writer)).storage_meta().checkpoint_id == "1"  # noqa: S301 - our own


def test_a_trainer_that_hides_a_run_because_it_restored_nothing_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with at(tmp_path) as checkpointer:
        for step in (3, 6):
            checkpointer.save(step, _STATE).result(60)
    with caplog.at_level(logging.WARNING), at(tmp_path) as checkpointer:
        checkpointer.restore(_STATE, 3)
        checkpointer.save(4, _STATE).result(60)
    assert "starts anew" not in caplog.text
    with caplog.at_level(logging.WARNING), at(tmp_path) as checkpointer:
        checkpointer.save(1, _STATE).result(60)
    assert "run exp42 starts anew at step 1: its steps up to 4 are hidden" in caplog.text
    assert "call restore before the first save" in caplog.text
