"""What a worker may say, one JSON object a line:

{"event": "progress", "done": int, "total": int}, {"event": "released"}: the arena is the trainer's again, and the job could
be finished without it; {"event": "committing"}: from now on it only waits for others; then {"event": "done", "result": {…}} or
{"event": "failed", "code": str, "message": str, "hint": str, "again": bool}; `again`: the same job may succeed later.

Failure behaviour: a line that is longer than `LINE_BYTES` or no event is None, to be counted and otherwise ignored.
"""

from __future__ import annotations

import msgspec

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.sidecar import messages as m

LINE_BYTES = 32 << 10


class Event(msgspec.Struct, frozen=True):
    """A line, taken apart; which fields count depends on `event`."""

    event: str
    done: m.Size = 0
    total: m.Size = 0
    result: msgspec.Raw = msgspec.Raw(b"{}")
    code: str = HeadraceError.code
    message: str = ""
    hint: str = ""
    again: bool = False


_events = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event | None:
    """The event of a line, or None for what is none."""
    try:
        found = _events.decode(line) if line else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return found if found is not None and bytes(found.result).startswith(b"{") else None


class Lines:
    """Cuts what comes into lines; an empty one stands for each that is longer than `LINE_BYTES`."""

    def __init__(self) -> None:
        self._rest, self._overlong = b"", False

    def feed(self, data: bytes) -> list[bytes]:
        *ended, self._rest = (self._rest + data).split(b"\n")
        lines = [b"" if len(line) > LINE_BYTES else line for line in ended]
        if ended and self._overlong:
            lines[0], self._overlong = b"", False
        if len(self._rest) > LINE_BYTES:
            self._rest, self._overlong = b"", True
        return lines
