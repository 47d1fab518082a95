"""Logging: standard library loggers under `headrace`, without secrets and terminal escapes, tracebacks included.

Invariant: importing Headrace configures nothing of the application's logging; only `setup` (used by the command line
and the daemon) installs a handler. Redaction happens in the logger itself, so it holds for the application's handlers
too. A line of the program logs at most `RECORDS` records in `SECONDS`; the next record says how many were left out.
So strangers that are refused a thousand times a second fill no disk. Failure behaviour: `warn_once` remembers a
bounded number of messages and falls silent beyond it.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass

from headrace.dataio.core.redact import printable, redact

_ROOT = "headrace"
_ONCE_LIMIT, _ONCE = 1000, "headrace_once"
RECORDS, SECONDS = 100, 60.0
_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_said: set[str] = set()


class _Redacting(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, _Line] = {}  # as many as the module has calls

    def filter(self, record: logging.LogRecord) -> bool:
        left_out = 0
        if record.levelno >= logging.INFO and not hasattr(record, _ONCE):
            line, now = self._lines.setdefault(record.lineno, _Line()), time.monotonic()
            if now >= line.until:
                left_out, line.said, line.until = line.said - RECORDS, 0, now + SECONDS
            line.said += 1
            if line.said > RECORDS:
                return False
        record.msg, record.args = printable(redact(record.getMessage())), ()
        if record.exc_info:  # handlers print this text instead of making their own
            record.exc_text = printable(redact(_FORMATTER.formatException(record.exc_info)))
        if left_out > 0:
            record.msg += f" ({left_out} more like this were left out)"
        return True


@dataclass(slots=True)
class _Line:
    """How often a line was logged in the present interval, and when that ends."""

    said: int = 0
    until: float = 0.0


def get_logger(name: str) -> logging.Logger:
    """The logger `name`, which is usually `__name__`; below `headrace` also where that is `__main__`."""
    logger = logging.getLogger(name if name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")
    if not any(isinstance(f, _Redacting) for f in logger.filters):
        logger.addFilter(_Redacting())
    return logger


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log `message` as a warning the first time this process comes to say it."""
    if message not in _said and len(_said) < _ONCE_LIMIT:
        _said.add(message)
        logger.warning(message, extra={_ONCE: True})


def setup(level: str = "INFO") -> None:
    """Send Headrace's log to standard error: for programs that are Headrace's own."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_FORMATTER)
        root.addHandler(handler)
    root.setLevel(level.upper())
