"""A writer in its own process, for tests that race writers or kill one.

    python -m headrace.dataio.testing.writer race URL KEY BODY
    python -m headrace.dataio.testing.writer stream URL KEY

`race` prints `ready`, waits for a line, calls `put_if_absent`, and prints True or False. `stream` writes a large object
slowly, and prints the number of each part.

Failure behaviour: an error ends the process with a traceback. Only tests use it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from headrace.dataio.store.open import open_store

PART_BYTES = 1 << 20
_PARTS = 64


def main(argv: list[str]) -> None:
    """Run one of the two commands, `race` or `stream`."""
    command, url, key = argv[:3]
    with open_store(url) as store:
        if command == "race":
            store.exists(key)  # connect before the start
            _print_line("ready")
            sys.stdin.readline()
            _print_line(str(store.put_if_absent(key, argv[3].encode())))
        else:
            _print_line(str(store.put_multipart(key, _slow_parts())))


def _slow_parts() -> Iterator[bytes]:
    for number in range(_PARTS):
        _print_line(f"part {number}")
        yield bytes([number]) * PART_BYTES
        time.sleep(0.01)


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
