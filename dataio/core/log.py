"""Logging: standard library loggers under `millrace`, without secrets and terminal escapes, tracebacks included.

Invariant: importing Millrace configures nothing of the application's logging; only `setup` (used by the command line and
the daemon) installs a handler. Redaction happens in the logger itself, so it holds for the application's handlers too.
Failure behaviour: `warn_once` remembers a bounded number of messages and falls silent beyond it.
"""

from __future__ import annotations

import logging
import sys

from dataio.core.redact import printable, redact

_ROOT = "millrace"
_ONCE_LIMIT = 1000
_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_said: set[str] = set()


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(redact(record.getMessage())), ()
        if record.exc_info:  # handlers print this text instead of making their own
            record.exc_text = printable(redact(_FORMATTER.formatException(record.exc_info)))
        return True


def get_logger(name: str) -> logging.Logger:
    """The logger `millrace.<name>`; `name` is usually `__name__`."""
    logger = logging.getLogger(f"{_ROOT}.{name}")
    if not any(isinstance(f, _Redacting) for f in logger.filters):
        logger.addFilter(_Redacting())
    return logger


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log `message` as a warning the first time this process comes to say it."""
    if message not in _said and len(_said) < _ONCE_LIMIT:
        _said.add(message)
        logger.warning(message)


def setup(level: str = "INFO") -> None:
    """Send Millrace's log to standard error: for programs that are Millrace's own."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_FORMATTER)
        root.addHandler(handler)
    root.setLevel(level.upper())
