"""The engine as a program, as the daemon starts it: descriptors in, lines of JSON out, exit codes; and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.saving import plan
from headrace.checkpoint.saving.plan import Failed, as_error, failed, to_json
from headrace.dataio.core.errors import CapacityError, ConflictError, HeadraceError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, Made, begin, latest, load, make, save, tiny_state


def start(made: Made, encoded: bytes | None = None, **environment: str) -> subprocess.Popen[str]:
    """`python -m headrace.checkpoint.saving.commit_worker` with the arena and the plan as memfds."""
    fds = []
    for name, data in (("arena", made.arena), ("plan", encoded or made.encoded)):
        fd = os.memfd_create(name)
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fds.append(fd)
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "headrace.checkpoint.saving.commit_worker",
                f"--arena-fd={fds[0]}",
                f"--plan-fd={fds[1]}",
            ],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
    finally:
        for fd in fds:
            os.close(fd)


def run(made: Made, encoded: bytes | None = None) -> tuple[int, list[dict[str, object]]]:
    with start(made, encoded) as process:
        out, errors = process.communicate(timeout=150)
    assert errors == ""
    return process.returncode, [json.loads(line) for line in out.splitlines()]


def test_the_program_commits_and_reports(store: Store) -> None:
    made = make(store, tiny_state(1), step=1, number=begin(store))
    code, events = run(made)
    assert code == 0
    kinds = [event["event"] for event in events]
    assert kinds[-3:] == ["released", "committing", "done"]
    assert set(kinds[:-3]) == {"progress"}
    assert events[-4]["done"] == events[-4]["total"]
    assert events[-1]["result"]["attempt"] == made.plan.attempt  # type: ignore[index]
    base = latest(store)
    assert base is not None
    assert load(store, base) == tiny_state(1)


def test_the_program_reports_a_conflict_with_its_exit_code(store: Store) -> None:
    number = begin(store)
    save(store, make(store, tiny_state(1), step=1, number=number))
    code, events = run(make(store, tiny_state(2), step=1, number=number))
    assert code == ConflictError.exit_code
    assert events[-1]["event"] == "failed"
    error = as_error(str(events[-1]["code"]), str(events[-1]["message"]), str(events[-1]["hint"]))
    assert type(error) is ConflictError
    assert "won" in error.message


def test_the_program_refuses_a_plan_it_does_not_understand(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        made = make(store, tiny_state(1), step=1)
    code, events = run(made, b"nonsense")
    assert (code, events[-1]["code"]) == (2, "usage")
    newer = plan.encode(msgspec.structs.replace(made.plan, version=2))
    code, events = run(made, newer)
    assert (code, events[-1]["code"]) == (2, "unsupported")


def test_the_program_goes_on_when_its_reports_are_not_read(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        made = make(store, tiny_state(1), step=1, number=begin(store))
        with start(made) as process:
            assert process.stdout is not None
            process.stdout.close()
            assert process.wait(60) == 0
        assert latest(store) is not None


def test_a_rank_that_dies_after_its_manifest_is_completed_by_the_other(tmp_path: Path) -> None:
    with open_store(tmp_path / "repo") as store:
        number = begin(store)
        ranks = [make(store, tiny_state(1), step=1, number=number, rank=0, world_size=2)]
        attempt = ranks[0].plan.attempt
        ranks.append(make(store, tiny_state(2), step=1, number=number, rank=1, world_size=2, attempt=attempt))
        mark = tmp_path / "mark"
        with start(ranks[1], HEADRACE_CRASH="ckpt.manifest-written", HEADRACE_CRASH_MARK=str(mark)) as process:
            process.communicate(timeout=150)
        assert process.returncode == -9
        assert mark.read_text() == "ckpt.manifest-written\n"
        assert latest(store) is None
        base = save(store, ranks[0])
        assert load(store, base, 1) == tiny_state(2)
        assert commit.recognise(store, Attempt(RUN, number, 1, attempt, 2)) is not None


def test_events_are_lines_and_errors_survive_them() -> None:
    line = json.loads(to_json(failed(CapacityError("full", hint="make room"))))
    assert line == {"event": "failed", "code": "capacity", "message": "full", "hint": "make room", "again": False}
    assert type(as_error("capacity", "full", "make room")) is CapacityError
    assert type(as_error("invented", "x", "")) is HeadraceError
    assert isinstance(failed(CapacityError("x")), Failed)


@pytest.mark.parametrize(
    "module",
    [
        "headrace.checkpoint",
        "headrace.checkpoint.saving.commit_worker",
        "headrace.checkpoint.repository.check",
        "headrace.checkpoint.cli",
        "headrace.checkpoint.repository.collect",
        "headrace.checkpoint.saving.copy_threads",
    ],
)
def test_the_daemons_side_never_imports_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0


def test_a_plan_holds_no_secret() -> None:
    with open_store(
        "s3://bucket/x", storage_options={"key": "ACCESSNAME", "secret": "hush", "endpoint_url": "http://127.0.0.1:1"}
    ) as store:
        encoded = make(store, tiny_state(1), step=1).encoded
    assert b"s3://bucket/x" in encoded
    assert b"http://127.0.0.1:1" in encoded
    assert b"hush" not in encoded
    assert b"ACCESSNAME" not in encoded
