"""What a check of `headrace doctor` found, how checks are run within their time, and which exit code follows.

Invariants: a check returns findings and raises nothing. A value that is missing, malformed or hostile gives `unknown`.
`run` returns after `seconds` at the latest, also if the check hangs on a dead mount or a dead server.
Failure behaviour: an exception in a check becomes a finding `unknown` with its type. An exception of the class
`HeadraceError` becomes an `error` with its message and its next step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from headrace.dataio.core.cli import one_line
from headrace.dataio.core.errors import HeadraceError, UnsupportedError
from headrace.dataio.core.redact import redact

Severity = Literal["ok", "unknown", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "unknown", "note", "warning", "error")
"""From harmless to harmful. A note costs nothing; a warning costs speed or safety; with an error something fails."""
TEXT = 400
"""The maximum length of a message and of an advice. Longer ones are cut."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        name: What was looked at, in few words. It is the same on every machine.
        severity: One of `SEVERITIES`.
        message: What was found, in one line.
        advice: What to change. Empty if nothing should be changed.
        seconds: How long the check took.
    """

    name: str
    severity: Severity
    message: str = ""
    advice: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def run(name: str, check: Callable[[], Finding | Iterable[Finding]], seconds: float) -> list[Finding]:
    """Run a check in a thread of its own, and return its findings after `seconds` at the latest.

    Example:
        >>> [found.severity for found in run("speed", lambda: Finding("speed", "ok"), 5.0)]
        ['ok']
    """
    answers: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    began = time.monotonic()
    threading.Thread(target=lambda: answers.put(_findings(name, check)), daemon=True, name=f"doctor {name}").start()
    try:
        found = answers.get(timeout=seconds)
    except queue.Empty:
        found = [Finding(name, "unknown", f"no answer within {seconds:g} seconds")]
    took = round(time.monotonic() - began, 4)
    return [
        replace(one, seconds=one.seconds or took, message=_line(one.message), advice=_line(one.advice)) for one in found
    ]


def _findings(name: str, check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except HeadraceError as error:
        return [Finding(name, "error", error.message, error.hint)]
    except Exception as error:
        return [Finding(name, "unknown", f"it could not be checked: {type(error).__name__}")]


def _line(text: str) -> str:
    line = one_line(redact(text[: 4 * TEXT]))
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"


def worst(findings: Iterable[Finding]) -> Severity:
    """The gravest severity among the findings; `ok` if there are none."""
    return max((found.severity for found in findings), key=SEVERITIES.index, default="ok")


def exit_code(findings: Sequence[Finding], store_error: HeadraceError | None = None) -> int:
    """0: nothing must be changed; 1: warnings; else the store's error, or 2 for any other error."""
    if store_error is not None:
        return store_error.exit_code
    return {"warning": 1, "error": UnsupportedError.exit_code}.get(worst(findings), 0)
