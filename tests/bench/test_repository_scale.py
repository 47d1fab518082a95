"""`python -m headrace.bench.control_plane.repository`: what it fills a repository with, and what it measures there."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.bench.control_plane import repository, repository_filling
from headrace.bench.control_plane.repository import METRICS, RETENTION, RETENTION_AGAIN
from headrace.bench.control_plane.repository_filling import RUN
from headrace.bench.core import measure, results
from headrace.bench.core.measure import Candidate, Progress
from headrace.bench.core.results import Part
from headrace.checkpoint import cli, read
from headrace.checkpoint.repository import check
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support import benchmarks

pytestmark = [pytest.mark.process, pytest.mark.slow]


def measured(folder: Path, steps: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Part:
    """What the command writes to its file, for a repository in a directory. Every action must succeed."""
    monkeypatch.setattr(measure, "run_process", benchmarks.fork)
    size = ["--steps", str(steps), "--ranks", str(ranks)]
    file = folder / "figures.json"
    assert repository.main([*size, "--url", str(folder / "repository"), "--json", str(file)]) == 0
    (part,) = results.read(file).parts
    assert not part.failed, part
    return part


def test_all_actions_succeed_and_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, ranks = 4, 120
    part = measured(tmp_path, steps, ranks, monkeypatch)
    assert part.settings["objects"] == 979
    planned = [action.name for action in repository.actions(steps, ranks)]
    planned.insert(planned.index(RETENTION) + 1, RETENTION_AGAIN)
    assert list(part.candidates) == planned
    for name, found in part.candidates.items():
        assert found.metrics.keys() >= METRICS.keys(), name
        assert all(value > 0 for metric in METRICS for value in found.metrics[metric]), name
    assert part.candidates["ckpt ls"].metrics["lines"] == [steps]
    by_steps = part.candidates["ckpt ls"].metrics["requests"][0]
    assert 3 * steps < by_steps < 5 * steps + 40  # the manifests of all ranks are not read


def test_every_command_of_ckpt_is_measured() -> None:
    commands = {action.arguments[0] for action in repository.actions(4, 1) if action.function == "ckpt"}
    moves_tensors = {
        "export",
        "import",
        "copy",
        "publish",
        "unpublish",
        "state",
    }  # their cost is that of the state, not of the steps
    assert commands == {"ls", "check", *cli.COMMANDS} - moves_tensors


@pytest.fixture(params=[(6, 3), (4, 120)])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, int, int]:
    """A store with a repository, and its numbers of steps and ranks."""
    steps, ranks = request.param
    store = open_store(tmp_path)
    repository_filling.fill(store, steps, ranks)
    return store, steps, ranks


def test_the_repository_is_sound_and_later_steps_need_the_packs_of_the_first(filled: tuple[Store, int, int]) -> None:
    store, steps, ranks = filled
    assert len(list(store.list(""))) == repository_filling.objects(steps, ranks) == {3: 51, 120: 979}[ranks]
    report = check.check(store)
    assert (report.problems, report.unreferenced, report.unfinished) == ([], [], [])
    assert [line.step for line in report.steps] == list(range(1, steps + 1))
    assert {line.world_size for line in report.steps} == {ranks}
    assert report.packs == steps * ranks
    shown = check.describe(store, RUN, "latest")
    assert (shown.packs, shown.earlier_packs) == (2 * ranks, ranks)
    assert shown.bases == (str(steps - 1),)
    assert shown.bytes_state == shown.bytes_written + shown.bytes_deduplicated
    assert shown.bytes_deduplicated == ranks * 8 * repository_filling.LENGTH


def test_each_step_has_its_values(filled: tuple[Store, int, int]) -> None:
    store, steps, ranks = filled
    count = ranks * repository_filling.LENGTH
    for step in (1, steps):
        with read(store, run=RUN, step=step, rank=ranks - 1) as saved:
            assert saved["weight"].read().tolist() == [step * 10**6 + place for place in range(count)]
            assert saved["moment"].read().tolist() == [-step * 10**6 - place for place in range(count)]
            assert saved["frozen"].read().tolist() == list(range(count))
            assert saved["own"].read().tolist() == [step, ranks - 1]
            assert saved["format"] == "filled"


def test_a_step_can_be_added_and_nothing_is_filled_twice(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        repository_filling.fill(store, 4, 2)
        repository_filling.add_step(store, 5, 2)
        report = check.check(store)
        assert report.clean
        assert [line.step for line in report.steps] == [1, 2, 3, 4, 5]
        with pytest.raises(UsageError, match="has a repository already"):
            repository_filling.fill(store, 4, 2)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--steps 3: at least 4"):
        repository.main(["--steps", "3", "--url", str(tmp_path)])


def test_a_wrong_result_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_process", benchmarks.fork)
    wrong = [repository.Action("latest", "latest", (9,)), repository.Action("check", "ckpt", ("check", "URL", "--no"))]
    monkeypatch.setattr(repository, "actions", lambda steps, ranks: wrong)
    file = tmp_path / "figures.json"
    url = str(tmp_path / "repository")
    assert repository.main(["--steps", "4", "--ranks", "1", "--url", url, "--json", str(file)]) == 1
    (part,) = results.read(file).parts
    (latest,), (code,) = (found.errors for found in part.candidates.values())
    assert "not step 9" in latest
    assert code.startswith("exit code 2")


def test_an_interrupted_command_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(
        candidates: Sequence[Candidate], rounds: int, progress: Progress, *_: object, seconds: float
    ) -> None:
        assert seconds == 7
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(repository, "alternate", interrupted)
    file, url = tmp_path / "figures.json", str(tmp_path / "repository")
    size = ["--steps", "4", "--ranks", "1", "--limit", "7"]
    assert repository.main([*size, "--url", url, "--json", str(file)]) == 130
    (part,) = results.read(file).parts
    assert part.status == "interrupted"
    assert part.settings["objects"] == repository_filling.objects(4, 1)
