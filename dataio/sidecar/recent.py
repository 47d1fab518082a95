"""The daemon's latest warnings and errors, for people who look at its status.

Invariant: at most `KEPT` different messages are kept, cut to `TEXT` characters, newest last; one that is repeated is counted,
not kept again. Secrets were removed by the loggers before anything comes here.
Failure behaviour: none; what does not fit is forgotten, oldest first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

KEPT, TEXT = 20, 400


@dataclass(slots=True)
class _Said:
    level: str
    when: float
    times: int = 1


class Recent(logging.Handler):
    """A handler of the logger `headrace`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: OrderedDict[str, _Said] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        text = text if len(text) <= TEXT else text[: TEXT - 1] + "…"
        known = self._said.pop(text, None)
        self._said[text] = _Said(record.levelname.lower(), record.created, known.times + 1 if known else 1)
        while len(self._said) > KEPT:
            self._said.popitem(last=False)

    def latest(self, now: float) -> list[dict[str, object]]:
        """Newest first; `age_seconds` before `now`, which is Unix time."""
        self.acquire()
        try:
            return [
                {"text": text, "level": said.level, "age_seconds": round(now - said.when, 1), "times": said.times}
                for text, said in reversed(self._said.items())
            ]
        finally:
            self.release()
