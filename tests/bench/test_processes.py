"""The processes that benchmarks and the demo start: none outlives the process that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.waiting import wait_for

STARTER = """
import sys, time
from pathlib import Path
from headrace.bench.core.processes import daemon
with daemon(Path(sys.argv[1]), http_port="off") as running:
    print(running.pid, flush=True)
    time.sleep(300)
"""


def runs(pid: int) -> bool:
    """Whether the process runs. One that has ended may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_daemon_ends_with_the_process_that_started_it_though_that_is_killed() -> None:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        starter = subprocess.Popen([sys.executable, "-c", STARTER, folder], stdout=subprocess.PIPE, text=True)
        try:
            assert starter.stdout is not None
            pid = int(starter.stdout.readline())
            assert runs(pid)
            starter.send_signal(signal.SIGKILL)
            starter.wait(60)
            wait_for(lambda: not runs(pid))
        finally:
            starter.kill()
            starter.communicate()
