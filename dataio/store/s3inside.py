"""Reads from S3 that go on in the caller's own thread: which may, and who waits for them.

Purpose: a request that is handed to a loop's thread and back costs four times what the request itself does. obstore can be called
and waited for with the interpreter's lock released, so a thread that would only wait asks by itself.
Invariants: never in the main thread, which a signal must be able to interrupt at any time; never before the ordinary way has
connected, or when it last looked at credentials of a chain more than `KEYS_SECONDS` ago. The interpreter's end waits until all
are out, since a thread that comes out of obstore meanwhile aborts the process; closing a store does not wait.
Failure behaviour: whatever is odd (a refusal, a range past the end, a body of another length) is read again the ordinary way,
which renews credentials and says what it is. A call that a silent server holds ends with its time-out, not with `close`.
"""

from __future__ import annotations

import os
import threading
import time

KEYS_SECONDS = 10.0


class Inside:
    """Counts the threads that are inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count, self._closed, self._pid = 0, False, os.getpid()

    def enter(self) -> bool:
        """Whether this thread may go in; then it must `leave`."""
        with self._changed:
            if self._closed or threading.get_ident() == threading.main_thread().ident:
                return False
            self._count += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._count -= 1
            if self._closed:
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more; who is inside comes out by itself."""
        with self._changed:
            self._closed = True

    def wait(self, seconds: float) -> None:
        """Close, and wait until everybody is out, at most so long. In a forked child nobody is inside."""
        if os.getpid() != self._pid:
            return
        self.close()
        until = time.monotonic() + seconds
        with self._changed:
            while self._count and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
