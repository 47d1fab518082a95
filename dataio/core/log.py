"""Logging: loggers of the standard library under `headrace`. Secrets and terminal escapes are removed from all text.

Invariants:

* Importing Headrace changes nothing in the application's logging. Only `setup`, which the command line and the daemon
  call, installs a handler.
* Without a handler, Python prints only the message of a warning. It then begins with `headrace: `.
* The logger itself removes secrets, from tracebacks too, so the application's handlers do not get them either.
* One line of the program logs at most `RECORDS` records of level INFO or above in `SECONDS`. The next record has the
  number of dropped ones. So a client that is refused a thousand times a second does not fill the disk.

* What several ranks of a node notice is a warning of the first that notices it, and a record of level DEBUG of the others.
  What all ranks of a job notice is a warning of rank 0.

Failure behaviour: `warn_once` remembers a limited number of messages. Further messages are not logged. Without Unix
sockets, the rank with the local number 0 warns for its node.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

from headrace.dataio.core.redact import printable, redact

Group = Literal["process", "node", "job"]
_ROOT = "headrace"
_ONCE_LIMIT, _ONCE = 1000, "headrace_once"
RECORDS, SECONDS = 100, 60.0
_RANKS: dict[Group, tuple[str, ...]] = {
    "process": (),
    "node": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "job": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
}
_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_logged: set[str] = set()
_CLAIMS_LIMIT = 64
_claims: dict[str, bool] = {}
_claim_sockets: list[Any] = []


class _Redacting(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, _Line] = {}  # one per logging call of the module

    def filter(self, record: logging.LogRecord) -> bool:
        dropped = 0
        if record.levelno >= logging.INFO and not hasattr(record, _ONCE):
            line, now = self._lines.setdefault(record.lineno, _Line()), time.monotonic()
            if now >= line.until:
                dropped, line.logged, line.until = line.logged - RECORDS, 0, now + SECONDS
            line.logged += 1
            if line.logged > RECORDS:
                return False
        record.msg, record.args = printable(redact(record.getMessage())), ()
        if record.exc_info:  # handlers print this text and do not format the traceback again
            record.exc_text = printable(redact(_FORMATTER.formatException(record.exc_info)))
        if dropped > 0:
            record.msg += f" ({dropped} more like this were dropped)"
        if not logging.getLogger(record.name).hasHandlers():
            record.msg = f"{_ROOT}: {record.msg}"
        return True


@dataclass(slots=True)
class _Line:
    """How many records one line has logged in the current interval, and when the interval ends."""

    logged: int = 0
    until: float = 0.0


def get_logger(name: str) -> logging.Logger:
    """Return the logger `name`, usually `__name__`. It is below `headrace` even if the name is `__main__`."""
    logger = logging.getLogger(name if name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")
    if not any(isinstance(f, _Redacting) for f in logger.filters):
        logger.addFilter(_Redacting())
    return logger


class _RedactingText(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


def redact_loggers(*names: str) -> None:
    """Remove secrets from the loggers of other libraries. botocore logs whole requests, with their session tokens."""
    for logger in map(logging.getLogger, names):
        if not any(isinstance(log_filter, _RedactingText) for log_filter in logger.filters):
            logger.addFilter(_RedactingText())


def is_first(group: Group) -> bool:
    """Whether this process is rank 0 of its training job, or the first rank on its node. True outside of a job.

    The rank is that of torch.distributed, or the variable RANK that torchrun sets; on a node, the variable LOCAL_RANK.
    Without these, it is the number that Slurm or Open MPI gives to the process.
    """
    if group == "process":
        return True
    dist: Any = sys.modules.get("torch.distributed")
    if group == "job" and dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    number = next((os.environ[name] for name in _RANKS[group] if os.environ.get(name)), "0")
    return number == "0"


def warn_once(logger: logging.Logger, message: str, per: Group = "process") -> None:
    """Log `message` as a warning, once per process.

    With `per`, it is a warning of one process of the node or the job, and a record of level DEBUG of the others.
    """
    if message not in _logged and len(_logged) < _ONCE_LIMIT:
        _logged.add(message)
        logger.log(_level(per, message), message, extra={_ONCE: True})


def warn_first(logger: logging.Logger, per: Group, message: str, *arguments: object) -> None:
    """Log a warning in one process of the node or the job, each time. The other processes log it at level DEBUG.

    It is for what may happen again, such as a lost connection; `warn_once` is for what stays as it is. The choice of the
    process depends on the message without its arguments.
    """
    logger.log(_level(per, message), message, *arguments, stacklevel=2)


def _level(per: Group, message: str) -> int:
    warns = _claims_on_node(message) if per == "node" else is_first(per)
    return logging.WARNING if warns else logging.DEBUG


def _claims_on_node(message: str) -> bool:
    """Whether this process warns of `message` for its job on this node: it is the first that has the message.

    The claim is the name of an abstract Unix socket. The kernel frees it when the process ends.
    """
    if not any(os.environ.get(name) for name in _RANKS["node"]):
        return True
    if message not in _claims:
        if len(_claims) >= _CLAIMS_LIMIT:
            return is_first("node")
        _claims[message] = _claim(message)
    return _claims[message]


def _claim(message: str) -> bool:
    import errno
    import hashlib
    import socket

    job = os.environ.get("MASTER_PORT") or os.environ.get("SLURM_STEP_ID") or os.getppid()
    parts = (os.getuid(), os.environ.get("SLURM_JOB_ID"), os.environ.get("MASTER_ADDR"), job, message)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0headrace-warning-{name}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE and is_first("node")
    _claim_sockets.append(claim)  # open until the process ends
    return True


def setup(level: str = "INFO") -> None:
    """Send Headrace's log to standard error. For Headrace's own programs only."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_FORMATTER)
        root.addHandler(handler)
    root.setLevel(level.upper())
