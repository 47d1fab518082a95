"""Logging: redacted, quiet unless set up, and bounded where it remembers."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time

import pytest

from headrace.dataio.core import log
from headrace.dataio.core.log import get_logger, warn_first, warn_once


def test_secrets_are_redacted_for_handlers_of_the_application_too(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("test.redact").warning("opened with %s", {"secret": "hunter2"})
    assert "hunter2" not in caplog.text
    assert "***" in caplog.text
    assert caplog.records[0].args == ()


def test_secrets_of_other_libraries_are_redacted_in_tracebacks_too(caplog: pytest.LogCaptureFixture) -> None:
    try:
        try:
            raise OSError("no way through http://me:hunter2@proxy:1")
        except OSError as error:
            raise RuntimeError("a job failed") from error
    except RuntimeError:
        get_logger("test.redact").exception("it failed")
    assert "RuntimeError: a job failed" in caplog.text
    assert "http://***@proxy:1" in caplog.text
    assert "hunter2" not in caplog.text


def test_terminal_escapes_are_in_no_record(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("\x1b]0;title\x07")
    except RuntimeError:
        get_logger("test.escapes").exception("of a \x1b[31mstranger")
    assert "?]0;title?" in caplog.text
    assert "of a ?[31mstranger" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_line_that_is_logged_without_end_is_said_so_often_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.DEBUG, "headrace.test.flood")
    logger = get_logger("test.flood")

    def say(number: int, level: int = logging.WARNING) -> None:
        logger.log(level, "stranger %d", number)

    for number in range(log.RECORDS + 50):
        say(number)
    logger.warning("another line")
    assert len(caplog.records) == log.RECORDS + 1
    now += log.SECONDS
    say(7)
    say(8)
    assert [record.message for record in caplog.records[-2:]] == [
        "stranger 7 (50 more like this were dropped)",
        "stranger 8",
    ]
    for number in range(2 * log.RECORDS):
        say(number, logging.DEBUG)  # asked for by setting the level
    assert len(caplog.records) == 3 * log.RECORDS + 3


def test_a_message_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", set())
    logger = get_logger("test.once")
    for message in ("no sidecar", "no sidecar", "slow disk"):
        warn_once(logger, message)
    assert [record.message for record in caplog.records] == ["no sidecar", "slow disk"]


def test_a_message_that_all_ranks_would_log_is_logged_by_the_first(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_logged", set())
    logger = get_logger("test.ranks")
    for rank, local_rank in (("0", "0"), ("9", "0"), ("9", "1")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        for per in ("process", "job"):
            warn_once(logger, f"rank {rank}/{local_rank}, once per {per}", per)
    assert [record.message for record in caplog.records] == [
        *(f"rank 0/0, once per {per}" for per in ("process", "job")),
        "rank 9/0, once per process",
        "rank 9/1, once per process",
    ]
    monkeypatch.delenv("RANK")
    assert log.is_first("job")


def test_a_process_that_is_not_the_first_with_a_message_on_its_node_does_not_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(log, "_claims", {})
    held = list[socket.socket]()
    monkeypatch.setattr(log, "_claim_sockets", held)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MASTER_PORT", f"of process {os.getpid()}")
    logger = get_logger("test.node")
    assert log._claim("slow disk")  # as another process would have it
    for message in ("slow disk", "no sidecar"):
        warn_once(logger, message, "node")
    for number in range(2):
        warn_first(logger, "node", "try %d failed", number)
    assert [record.message for record in caplog.records] == ["no sidecar", "try 0 failed", "try 1 failed"]
    for number in range(log._CLAIMS_LIMIT):
        warn_once(logger, f"message {number}", "node")
    assert len(held) == log._CLAIMS_LIMIT  # then the rank with the local number 0 warns
    assert len(caplog.records) == 3 + log._CLAIMS_LIMIT - len(("slow disk", "no sidecar", "try %d failed"))
    for claim in held:
        claim.close()


def test_the_first_process_of_a_node_is_known_also_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for names in log._RANKS.values() for name in names]:
        monkeypatch.delenv(name, raising=False)
    assert log.is_first("node")
    monkeypatch.setenv("SLURM_PROCID", "9")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert not log.is_first("node")
    assert not log.is_first("job")
    monkeypatch.setenv("LOCAL_RANK", "0")  # torchrun under srun
    assert log.is_first("node")
    assert log.is_first("process")


def test_without_a_handler_a_warning_begins_with_the_librarys_name() -> None:
    program = (
        "import sys\nfrom headrace.dataio.core.log import get_logger\n%s\nget_logger('x').warning('no %%s', 'sidecar')"
    )
    for more, line in (
        ("", "headrace: no sidecar\n"),
        ("import logging; logging.basicConfig()", "WARNING:headrace.x:no sidecar\n"),
    ):
        done = subprocess.run([sys.executable, "-c", program % more], capture_output=True, text=True, check=True)
        assert done.stderr == line


def test_what_is_remembered_is_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", set())
    logger = get_logger("test.bound")
    for number in range(log._ONCE_LIMIT + 10):
        warn_once(logger, f"message {number}")
    assert len(caplog.records) == len(log._logged) == log._ONCE_LIMIT


def test_importing_installs_no_handler_and_setup_one() -> None:
    program = (
        "import logging\nfrom headrace.dataio.core.log import get_logger, setup\nroot = logging.getLogger('headrace')\n"
        "get_logger('x')\nassert not root.handlers and not logging.getLogger().handlers\n"
        "setup('debug'); setup('info')\nassert len(root.handlers) == 1 and root.level == logging.INFO\n"
        "get_logger('x').info('token=hunter2')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "INFO headrace.x: token=***" in done.stderr
    assert "hunter2" not in done.stderr
    assert logging.getLogger("headrace") is not logging.getLogger()
