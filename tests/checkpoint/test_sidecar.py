"""A real daemon carries real saves: the trainer may die, the daemon may die, the job may die."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.checkpoint import Checkpointer, attachments, read, read_artifact
from headrace.checkpoint.repository import check, survey
from headrace.checkpoint.saving import executor
from headrace.checkpoint.saving.staged_save import StagedSave
from headrace.dataio.core.errors import DeadlineError, TransientError
from headrace.dataio.sidecar import connection
from headrace.dataio.sidecar.client import SaveMeter, Sidecar, StagedJob
from headrace.dataio.sidecar.jobs.memfd import sealed
from headrace.dataio.sidecar.jobs.runner import TRIES
from headrace.dataio.store.base import Location
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.system import stopped
from tests.checkpoint.test_processes import start as start_trainer
from tests.support import nursery
from tests.support.checkpoint_states import RUN, Wrapped, begin, make, tiny_state
from tests.support.waiting import wait_for as wait_for


@dataclass
class Daemon:
    """`headrace sidecar run`."""

    folder: Path
    process: nursery.Process | None = None

    @property
    def socket(self) -> str:
        return str(self.folder / "sidecar.sock")

    def start(self, **environment: str) -> None:
        options = ["--socket", self.socket, "--http-port", "off", "--cache-dir", str(self.folder / "cache")]
        options += ["--cache-bytes", "1MiB"]
        log = self.folder / "log"
        self.process = nursery.start_with_log(log, "tests.support.daemon_command", *options, **environment)
        wait_for(self.answers)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        found = Sidecar.find(self.socket)
        if found is not None:
            found.close()
        return found is not None

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(150)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:  # short, since a socket's path must be
        made = Daemon(Path(folder))
        yield made
        made.stop()


def steps_of(url: str) -> list[int]:
    with Checkpointer(url, run="exp", sidecar=None) as checkpointer:
        return checkpointer.steps()


def test_a_daemon_that_hangs_holds_up_no_save(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_SECONDS", 0.2)
    monkeypatch.setattr(connection, "HUNG_SECONDS", 0.5)
    daemon.start()
    with Checkpointer(str(tmp_path), run="exp", sidecar=daemon.socket) as checkpointer:
        assert checkpointer.save(1, {"w": torch.zeros(1000)}).result(60).committed_by == "sidecar"
        assert daemon.process is not None
        with stopped(daemon.process.pid):
            began = time.monotonic()
            assert checkpointer.save(2, {"w": torch.ones(1000)}).result(60).committed_by == "process"
            assert time.monotonic() - began < 40
        assert checkpointer.steps() == [1, 2]


def test_killing_the_trainer_right_after_staged_still_commits(daemon: Daemon, store_url: str) -> None:
    daemon.start()
    process = start_trainer("hand-over", store_url, daemon.socket)
    assert process.stdout is not None
    assert '"committed_by": "sidecar"' in process.stdout.readline()
    process.kill()
    process.communicate(timeout=150)
    assert process.returncode == -9
    wait_for(lambda: steps_of(store_url) == [1])
    state = {"w": torch.zeros(200_000), "n": 0}
    with Checkpointer(store_url, run="exp", sidecar=None) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert torch.equal(state["w"], torch.arange(200_000.0))  # type: ignore[arg-type]
    assert state["n"] == 7


def test_the_daemon_carries_save_after_save_through_one_arena(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start()
    state = {"w": torch.randn(300_000)}
    with Checkpointer(str(tmp_path), run="exp", sidecar=daemon.socket) as checkpointer:
        handles = []
        for step in range(4):
            expected = state["w"].clone()
            handles.append(checkpointer.save(step, state))
            state["w"].add_(1)
        results = [handle.result(60) for handle in handles]
        assert [r.committed_by for r in results] == ["sidecar"] * 4
        assert checkpointer.restore(state) == 3
        assert torch.equal(state["w"], expected)
    with open_store(tmp_path) as store:
        assert check.check(store).clean


def test_a_save_by_the_daemon_leaves_the_digest_of_the_manifest(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start()
    weights = {"w": torch.randn(300_000)}
    with open_store(tmp_path) as store, Checkpointer(store, run="exp", sidecar=daemon.socket) as checkpointer:
        assert checkpointer.save(1, weights).result(60).committed_by == "sidecar"
        own = checkpointer._executor.own_manifest
        assert own is not None
        assert not own.data
        second = checkpointer.save(2, weights).result(60)
        assert second.committed_by == "sidecar"
        assert second.bytes_deduplicated == second.bytes_state
        assert check.check(store).clean


def test_the_daemon_commits_metadata_description_and_artifacts(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start()
    with Checkpointer(str(tmp_path), run="exp", sidecar=daemon.socket) as checkpointer:
        checkpointer.describe(config={"lr": 1e-3})
        for step in (1, 2):
            checkpointer.put_artifact(step, "log", b"x" * step)
            handle = checkpointer.save(step, {"w": torch.zeros(1000)}, metadata={"loss": math.inf, "step": step})
            assert handle.result(60).committed_by == "sidecar"
    for step in (1, 2):
        assert read_artifact(tmp_path, run="exp", step=step, name="log") == b"x" * step
        with read(tmp_path, run="exp", step=step) as saved:
            assert saved.metadata == {"loss": math.inf, "step": step}
            assert saved.description["config"] == {"lr": 1e-3}
    with open_store(tmp_path) as store:
        assert [line.metadata["step"] for line in survey.survey(store).steps] == [1, 2]


def test_a_step_with_an_artifact_on_disk_is_committed_without_the_daemon(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.start()
    (tmp_path / "large").write_bytes(b"x" * 200_000)
    limits = attachments.Limits(memory_bytes=1000)
    monkeypatch.setattr(attachments, "Limits", lambda: limits)
    with Checkpointer(str(tmp_path / "r"), run="exp", sidecar=daemon.socket) as checkpointer:
        checkpointer.put_artifact(1, "large", tmp_path / "large")
        assert checkpointer.save(1, {"w": torch.zeros(1000)}).result(60).committed_by == "process"
        assert checkpointer.save(2, {"w": torch.zeros(1000)}).result(60).committed_by == "sidecar"
    assert read_artifact(tmp_path / "r", run="exp", step=1, name="large") == b"x" * 200_000


def test_a_step_committed_by_an_orphan_of_a_killed_daemon_is_reported_as_committed(
    daemon: Daemon, tmp_path: Path
) -> None:
    daemon.start()
    with Checkpointer(str(tmp_path), run="exp", sidecar=daemon.socket) as checkpointer:
        handle = checkpointer.save(1, {"w": torch.randn(5_000_000)})
        handle.staged(60)
        wait_for(lambda: handle.done or (tmp_path / "leases").exists())  # the job's own process is at work
        daemon.stop()
        assert handle.result(60).step == 1
        assert checkpointer.save(2, {"w": torch.zeros(10)}).result(60).committed_by == "process"
        assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize(("point", "committed"), [("ckpt.packs-written", False), ("ckpt.decision-written", True)])
def test_when_the_job_dies_the_repository_decides(daemon: Daemon, tmp_path: Path, point: str, committed: bool) -> None:
    mark = tmp_path / "mark"
    daemon.start(HEADRACE_CRASH=point, HEADRACE_CRASH_MARK=str(mark))
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=daemon.socket) as checkpointer:
        handle = checkpointer.save(1, {"w": torch.randn(1000)})
        if committed:
            assert handle.result(60).step == 1
        else:
            with pytest.raises(TransientError, match="its process ended with code -9"):
                handle.result(60)
        assert mark.read_text() == (point + "\n") * (1 if committed else TRIES)
        assert checkpointer.steps() == ([1] if committed else [])


def hostile(folder: Path) -> Path:
    """The folder, with modules that must not be imported."""
    (folder / "headrace").mkdir(parents=True)
    for name in ("numpy.py", "headrace/__init__.py"):
        (folder / name).write_text(
            f"open({str(folder / 'imported')!r}, 'a').write(__name__)\nraise OSError('hostile')\n"
        )
    return folder


def test_the_daemons_workers_import_nothing_from_the_folder_that_it_was_started_in(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile(tmp_path / "cwd"))
    daemon.start(PYTHONPATH=os.pathsep + os.environ.get("PYTHONPATH", ""))  # the empty entry means that folder, too
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=daemon.socket) as checkpointer:
        assert checkpointer.save(1, {"w": torch.zeros(1000)}).result(60).committed_by == "sidecar"
    assert not Path("imported").exists()


def test_what_the_daemon_can_never_run_is_saved_by_the_trainer(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.start(PYTHONPATH=str(hostile(tmp_path / "broken")))
    state = {"w": torch.arange(1000.0)}
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=daemon.socket) as checkpointer:
        assert checkpointer.save(1, state).result(60).committed_by == "process"
        assert checkpointer.save(2, state).result(60).committed_by == "process"
        assert checkpointer.restore({"w": torch.zeros(1000)}) == 2
    assert "saving inside this process" in caplog.text
    assert "OSError: hostile" in caplog.text
    assert (tmp_path / "broken" / "imported").read_text() in ("numpy" * 2, "headrace" * 2)


def test_without_a_daemon_the_save_happens_here_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.dataio.core import log

    log._logged.discard("no sidecar answers: saving inside this process")
    with Checkpointer(str(tmp_path), run="exp", sidecar=str(tmp_path / "none.sock")) as checkpointer:
        for step in (1, 2):
            assert checkpointer.save(step, {"w": torch.zeros(5)}).result(60).committed_by == "process"
    output = [r for r in caplog.records if "no sidecar answers" in r.getMessage()]
    assert len(output) == 1


def test_two_workers_of_one_save_do_each_other_no_harm(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon took the save over, but its answer was lost: this process cannot know, and carries it too."""
    daemon.start()
    real, seen = Sidecar.stage, list[str]()

    def deaf(self: Sidecar, kind: str, arena_fd: int, plan: bytes, about: str, **more: Any) -> Any:
        assert about == f"exp, step {1 + len(seen)}"
        seen.append(about)
        real(self, kind, arena_fd, plan, about, **more)
        raise DeadlineError("the sidecar did not answer")

    monkeypatch.setattr(Sidecar, "stage", deaf)
    state = {"w": torch.randn(2_000_000)}
    with Checkpointer(str(tmp_path), run="exp", sidecar=daemon.socket) as checkpointer:
        assert checkpointer.save(1, state).result(60).committed_by == "process"
        assert checkpointer._saver.staging._arena is None  # the daemon may still read it
        first = state["w"].clone()
        state["w"].zero_()
        checkpointer.save(2, state).result(60)
        assert checkpointer.restore(state, step=1) == 1
        assert torch.equal(state["w"], first)
    wait_for(lambda: not any((tmp_path / "leases").glob("*.json")))
    with open_store(tmp_path) as store:
        assert check.check(store).clean


def test_secrets_in_the_options_keep_the_save_in_this_process(daemon: Daemon, tmp_path: Path) -> None:
    class Secretive(Wrapped):
        @property
        def location(self) -> Location:
            return msgspec.structs.replace(self.inner.location, shareable=False)

    daemon.start()
    with (
        open_store(tmp_path) as inner,
        Checkpointer(Secretive(inner), run="exp", sidecar=daemon.socket) as checkpointer,
    ):
        assert checkpointer.save(1, {"w": torch.zeros(5)}).result(60).committed_by == "process"


def test_a_save_whose_daemon_is_gone_for_good_is_carried_here_and_its_arena_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        broken = True

        def stage(self, kind: str, arena_fd: int, plan: bytes, about: str, **more: Any) -> StagedJob:
            staged = StagedJob("token")
            staged.connection_lost(TransientError("the connection to the sidecar ended"))
            return staged

        def close(self) -> None: ...

    found = iter([Gone()])
    monkeypatch.setattr(Sidecar, "find", lambda _: next(found, None))
    monkeypatch.setattr(executor, "RETURN_SECONDS", 0.05)
    with Checkpointer(str(tmp_path), run="exp", sidecar="auto") as checkpointer:
        handle = checkpointer.save(1, {"w": torch.zeros(5)})
        assert handle.result(60).committed_by == "sidecar"  # who had it first
        assert checkpointer._saver.staging._arena is None
        assert checkpointer.steps() == [1]


def test_a_save_that_a_daemon_carries_ends_when_another_ranks_node_is_lost(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.start()
    monkeypatch.setattr(executor, "_WATCH_SECONDS", 0.05)
    with open_store(tmp_path) as store:
        made = make(store, tiny_state(1), step=1, number=begin(store), world_size=2)
        fd = sealed("arena", bytes(made.arena))
        save = StagedSave(
            plan=made.plan,
            arena_fd=fd,
            view=lambda: made.arena,
            give_back=lambda: None,
            abandon=lambda: None,
            handed_over=lambda committed_by: None,
            silent_ranks=lambda ranks: "the node of rank 1 does not answer" if 1 in ranks else "",
        )
        own = executor.SaveExecutor(store, daemon.socket, meter=SaveMeter(RUN))
        with pytest.raises(TransientError, match="was aborted: the node of rank 1 does not answer"):
            own.commit_staged(save)
        own.close()
        os.close(fd)
    assert steps_of(str(tmp_path)) == []
