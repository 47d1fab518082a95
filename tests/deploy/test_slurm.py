"""Slurm's scripts, run as Slurm would run them: prolog, a job that is told to stop and runs again, epilog."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.checkpoint import Checkpointer
from tests.dataio.sidecar.conftest import wait_for
from tests.support.forked_programs import ForkedPrograms
from tests.support.slurm_node import SLURM, Node, slurm_node
from tests.support.tier_nodes import free_port


@pytest.fixture
def node() -> Iterator[Node]:
    with slurm_node() as made:
        yield made


@pytest.fixture
def rank_python(node: Node) -> Iterator[str]:
    """The program by which torchrun and Slurm start trainers, as forks."""
    with ForkedPrograms(node.folder / "programs"):
        yield str(node.folder / "programs" / "python")


def test_a_users_jobs_share_a_sidecar_which_drains_after_the_last(node: Node) -> None:
    node.script("prolog.sh", 1)
    first = node.daemon
    assert first is not None
    node.script("prolog.sh", 2)
    assert node.daemon == first
    assert node.run.stat().st_mode & 0o777 == 0o700
    node.script("epilog.sh", 1)
    assert node.daemon == first
    node.script("epilog.sh", 2)
    wait_for(lambda: node.daemon is None)
    node.script("epilog.sh", 3)  # nothing is left to stop


def test_a_sidecar_that_cannot_start_does_not_drain_the_node(node: Node) -> None:
    node.environment["HEADRACE_SLURM_OPTIONS"] = "--cache-bytes nonsense"
    node.script("prolog.sh", 1)
    assert node.daemon is None
    assert "nonsense" in (node.run / "sidecar.log").read_text()


def test_a_job_that_is_told_to_stop_saves_is_requeued_and_goes_on(node: Node, rank_python: str) -> None:
    node.script("prolog.sh", 7)
    environment = {**node.environment, "SLURM_JOB_ID": "7", "STEPS": "400", "STEP_SECONDS": "0.01"}
    environment["PYTHON"] = rank_python

    def start(log: Path, **more: str) -> subprocess.Popen[bytes]:
        with open(log, "wb") as out:
            return subprocess.Popen(["bash", SLURM / "train.sbatch"], env=environment | more, stdout=out, stderr=out)

    log = node.folder / "first.log"
    with start(log) as job:
        wait_for(lambda: "from step 0" in log.read_text(), 90)
        os.kill(int((node.folder / "task").read_text()), signal.SIGUSR1)
        assert job.wait(90) == 99, log.read_text()
    (stopped,) = [int(line.split()[2]) for line in log.read_text().splitlines() if line.startswith("saved step")]
    assert (node.folder / "scontrol.log").read_text() == "requeue 7\n"
    again = node.folder / "again.log"
    with start(again, STEPS=str(stopped + 30)) as job:
        assert job.wait(120) == 0, again.read_text()
    assert f"from step {stopped}\n" in again.read_text()
    assert again.read_text().endswith("done\n")
    status = subprocess.run(
        [node.environment["HEADRACE_BIN"], "sidecar", "status", "--json", "--socket", node.socket],
        env=environment,
        capture_output=True,
        check=True,
        timeout=150,
    )
    (line,) = json.loads(status.stdout)["training"]
    assert (line["job"], line["last_step"]) == ("example", stopped + 30)
    node.script("epilog.sh", 7)
    wait_for(lambda: node.daemon is None)


@pytest.mark.parametrize(("how", "trainers"), [("to the script", 2), ("to all processes", 1)])
def test_trainers_under_torchrun_save_and_their_code_reaches_slurm(
    node: Node, rank_python: str, how: str, trainers: int
) -> None:
    environment = {**node.environment, "STEPS": "100000", "STEP_SECONDS": "0.01", "HEADRACE_SIDECAR": ""}
    environment |= {"TORCHRUN": f"{sys.executable} -m torch.distributed.run", "PYTHON_EXEC": rank_python}

    def start(name: str, steps: int) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
        """Start two nodes."""
        port = free_port("127.0.0.1")
        options = [
            "--nnodes=2",
            f"--nproc-per-node={trainers}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
        ]
        command = ["bash", str(SLURM / "torchrun.sh"), *options, f"--rdzv-id={name}", str(SLURM / "train.py")]
        logs, tasks = [node.folder / f"{name}-{number}.log" for number in range(2)], []
        for log in logs:
            with open(log, "wb") as out:
                of_task = {**environment, "STEPS": str(steps)}
                tasks.append(subprocess.Popen(command, env=of_task, stdout=out, stderr=out, start_new_session=True))
        return tasks, logs

    tasks, logs = start("first", 100_000)
    try:
        wait_for(lambda: all(log.read_text().count("from step 0") == trainers for log in logs), 120)
        if how == "to the script":
            os.kill(tasks[0].pid, signal.SIGUSR1)
        else:
            os.killpg(tasks[0].pid, signal.SIGUSR1)
        assert [task.wait(120) for task in tasks] == [99, 99], logs[0].read_text() + logs[1].read_text()
        stopped = {line for log in logs for line in log.read_text().splitlines() if line.startswith("saved step")}
        assert len(stopped) == 1
        step = int(stopped.pop().split()[2])
        with Checkpointer(node.environment["CHECKPOINTS"], run="example", sidecar=None) as checkpointer:
            assert checkpointer.steps()[-1] == step
        if how == "to all processes":  # what is saved does not depend on where the signal came from
            return
        tasks, logs = start("again", step + 20)
        assert [task.wait(120) for task in tasks] == [0, 0], logs[0].read_text() + logs[1].read_text()
        assert logs[0].read_text().count(f"from step {step}\n") == trainers
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)


def test_a_trainer_that_fails_under_torchrun_is_not_requeued(node: Node, rank_python: str) -> None:
    environment = {**node.environment, "TORCHRUN": f"{sys.executable} -m torch.distributed.run", "CHECKPOINTS": "x://y"}
    environment["PYTHON_EXEC"] = rank_python
    command = ["bash", str(SLURM / "torchrun.sh"), "--standalone", "--nproc-per-node=1", str(SLURM / "train.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "x://" in done.stderr
    assert done.returncode == 1


# --- a user that prepares the directories which root comes to

STAND_IN = """#!/bin/bash
[ "$2" = status ] && exit 1
id -u >> {folder}/ran
echo "evil::0:0::/root:/bin/bash"
"""


@dataclass
class Attacked:
    """A node on which the user `nobody` starts jobs, with files that belong to root."""

    folder: Path
    user = pwd.getpwnam("nobody")

    def script(self, name: str, job: int, cache: str = "cache") -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "HEADRACE_BIN": f"{self.folder}/headrace",
            "HEADRACE_RUN_DIR": f"{self.folder}/run",
            "HEADRACE_CACHE_DIR": f"{self.folder}/{cache}",
            "SLURM_JOB_USER": self.user.pw_name,
            "SLURM_JOB_ID": str(job),
        }
        done = subprocess.run([SLURM / name], env=environment, timeout=150, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def as_user(self, program: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", program], cwd=self.folder, user=self.user.pw_uid, group=self.user.pw_gid, extra_groups=[]
        )

    @property
    def of_root(self) -> dict[str, tuple[int, int, bytes]]:
        """Owner, mode and content of all that is root's own."""
        found = {}
        for path in sorted((self.folder / "root").rglob("*")):
            content = path.read_bytes() if path.is_file() else b""
            found[path.name] = (path.stat().st_uid, path.stat().st_mode, content)
        return found


@pytest.fixture
def attacked() -> Iterator[Attacked]:
    if os.geteuid() != 0:
        pytest.skip("Slurm runs its prolog as root")
    with tempfile.TemporaryDirectory(prefix="mr-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for inside in ("run", "cache", "root/etc"):
            (folder / inside).mkdir(parents=True)
        for file in ("passwd", "important", "etc/shadow"):
            (folder / "root" / file).write_text("of root\n")
        (folder / "ran").touch()
        (folder / "ran").chmod(0o666)
        (folder / "headrace").write_text(STAND_IN.format(folder=folder))
        (folder / "headrace").chmod(0o755)
        yield Attacked(folder)


def test_root_opens_and_changes_nothing_in_a_directory_of_the_users(attacked: Attacked) -> None:
    before = attacked.of_root
    attacked.script("prolog.sh", 1)
    mine = attacked.folder / "run" / "headrace-nobody"
    assert (mine.stat().st_uid, mine.stat().st_mode & 0o777) == (attacked.user.pw_uid, 0o700)
    links = "ln -s ../../root/important prolog.lock && ln -s ../../root/passwd sidecar.log && ln -s ../../root/etc jobs"
    assert attacked.as_user(f"cd run/headrace-nobody && rm -rf prolog.lock sidecar.log jobs && {links}").wait(20) == 0
    for job in (2, 3):
        attacked.script("prolog.sh", job)
        attacked.script("epilog.sh", job)
    assert attacked.as_user("cd run/headrace-nobody && rm prolog.lock jobs && mkdir jobs").wait(20) == 0
    attacked.script("prolog.sh", 4)  # now the log is opened, too
    assert attacked.of_root == before
    assert (attacked.folder / "ran").read_text().split() == [str(attacked.user.pw_uid)] * 2
    assert not (mine / "sidecar.log").is_symlink()


@pytest.mark.parametrize("cache", ["scratch/deep/er", "scratch/deep", "admins"])
def test_root_makes_no_directory_behind_a_link_of_the_users(attacked: Attacked, cache: str) -> None:
    (attacked.folder / "scratch").mkdir()
    (attacked.folder / "scratch").chmod(0o1777)
    (attacked.folder / "admins").symlink_to("scratch/deep")
    assert attacked.as_user("ln -s ../root/etc scratch/deep").wait(20) == 0
    before = attacked.of_root
    attacked.script("prolog.sh", 1, cache)
    assert attacked.of_root == before
    assert (attacked.folder / "run" / "headrace-nobody").is_dir(), "the prolog did not come to the cache"


def test_directories_that_are_not_there_are_made_where_only_root_can_write(attacked: Attacked) -> None:
    (attacked.folder / "link").symlink_to("cache")
    attacked.script("prolog.sh", 1, "link/deep/er")
    made = attacked.folder / "cache" / "deep" / "er" / "headrace-nobody"
    assert (made.parent.stat().st_uid, made.stat().st_uid) == (0, attacked.user.pw_uid)


def test_root_gives_away_no_directory_that_a_user_can_swap(attacked: Attacked) -> None:
    before = attacked.of_root
    for parent in ("run", "cache"):
        (attacked.folder / parent).chmod(0o1777)
    swap = """
    for i in $(seq 20000); do
      for at in run cache; do
        ln -sfn ../root/etc $at/headrace-nobody; rm -f $at/headrace-nobody; mkdir -p $at/headrace-nobody
        echo >> run/swapped; rmdir $at/headrace-nobody
      done
    done 2> /dev/null"""
    with attacked.as_user(swap) as racing:
        try:
            wait_for(lambda: (attacked.folder / "run" / "swapped").exists())
            for job in range(1, 9):
                attacked.script("prolog.sh", job)
        finally:
            racing.kill()
    assert attacked.of_root == before
    attacked.as_user("rm -rf run/headrace-nobody cache/headrace-nobody; ln -s ../root/etc run/headrace-nobody").wait(20)
    attacked.script("prolog.sh", 9)
    attacked.script("epilog.sh", 9)
    assert attacked.of_root == before
