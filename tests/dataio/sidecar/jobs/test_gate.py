"""The gate: workers pass it unless the daemon closes it, and always when the daemon is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from headrace.dataio.sidecar.jobs.gate import PriorityGate, pass_by
from tests.dataio.sidecar.conftest import wait_for

CLOSE_AND_WAIT = """
import sys, time
from pathlib import Path
from headrace.dataio.sidecar.jobs.gate import PriorityGate
gate = PriorityGate(Path(sys.argv[1]))
gate.close_for_others(True)
print("closed" if gate.closed else "open", flush=True)
time.sleep(60)
"""


def passes(fd: int, seconds: float) -> bool:
    """Whether the gate let a job pass within `seconds`."""
    began = time.monotonic()
    pass_by(fd, seconds)
    return time.monotonic() - began < seconds


def test_it_is_open_until_it_is_closed_and_again_when_it_is_opened(tmp_path: Path) -> None:
    gate = PriorityGate(tmp_path / "gate")
    fds = [gate.for_a_worker() for _ in range(2)]
    assert all(passes(fd, 5) for fd in fds)
    gate.close_for_others(True)
    assert not any(passes(fd, 0.1) for fd in fds)
    waiter = threading.Thread(target=pass_by, args=(fds[0],))
    waiter.start()
    gate.close_for_others(False)
    waiter.join(150)
    assert not waiter.is_alive()
    for fd in fds:
        os.close(fd)
    gate.close()


def test_a_daemon_that_is_killed_holds_no_other_back(tmp_path: Path) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", CLOSE_AND_WAIT, str(tmp_path / "gate")], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == "closed\n"
    gate = PriorityGate(tmp_path / "gate")
    fd = gate.for_a_worker()
    assert not passes(fd, 0.1)
    daemon.send_signal(signal.SIGKILL)
    daemon.communicate()
    assert passes(fd, 5)
    os.close(fd)
    gate.close()


def test_somebody_who_passes_delays_closing_for_a_moment_only(tmp_path: Path) -> None:
    import fcntl

    gate = PriorityGate(tmp_path / "gate")
    fd = gate.for_a_worker()
    fcntl.flock(fd, fcntl.LOCK_SH)
    gate.close_for_others(True)
    assert not gate.closed
    fcntl.flock(fd, fcntl.LOCK_UN)

    def closed() -> bool:
        gate.close_for_others(True)
        return gate.closed

    wait_for(closed)
    os.close(fd)
    gate.close()
