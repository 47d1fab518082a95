"""`millrace trace`: event logs of many ranks as one trace for Perfetto or chrome://tracing.

Invariant: files are read line by line and written as they are read, so memory does not grow with them; every (host, process)
is one track with its rank as its name.
Failure behaviour: a line that is no event (the last one of a killed process, as a rule) is skipped and counted; the exit code
is then 1. A file without a header is refused: it is no event log.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from dataio.core.errors import NotFoundError, UsageError
from dataio.core.options import Parser
from dataio.core.outputs import written_whole
from dataio.core.trace import HEADER, VERSION

LINE_BYTES = 64 << 10


def trace(argv: list[str]) -> int:
    """The sub-command's entry point."""
    parser = Parser(
        prog="millrace trace",
        description="Turn event logs (MILLRACE_EVENTS=DIR) into one trace: open it in ui.perfetto.dev.",
        epilog="exit codes: 0 done · 1 lines that are no events were skipped · 2 wrong use",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="event logs, or directories of them")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the trace, in Chrome's JSON format")
    options = parser.parse_args(argv)
    reader = _Reader()
    try:
        with written_whole(options.output) as file, io.TextIOWrapper(file, "utf-8") as out:
            events = _write(out, reader.all(_found(options.files)))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    print(f"{options.output}: {events} events of {len(reader.tracks)} processes")
    if reader.skipped:
        print(f"skipped {reader.skipped} lines that are no events", file=sys.stderr)
    return 1 if reader.skipped else 0


def _found(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted([*path.glob("*.jsonl.1"), *path.glob("*.jsonl")])
        elif path.is_file():
            files.append(path)
        else:
            raise NotFoundError(f"there is no {path}", hint="name event logs, or the directory of MILLRACE_EVENTS")
    if not files:
        raise NotFoundError("these directories hold no event logs", hint="set MILLRACE_EVENTS=DIR for the trainers")
    return files


def _write(out: TextIO, events: Iterable[dict[str, Any]]) -> int:
    count, before = 0, "\n"
    out.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in events:
        out.write(before + json.dumps(event))
        count, before = count + (event["ph"] == "X"), ",\n"
    out.write("\n]}\n")
    return count


class _Reader:
    """Reads logs; `tracks` numbers the processes that were met."""

    def __init__(self) -> None:
        self.tracks: dict[tuple[str, int], int] = {}
        self.skipped = 0

    def all(self, files: Iterable[Path]) -> Iterator[dict[str, Any]]:
        for path in files:
            yield from self._one(path)

    def _one(self, path: Path) -> Iterator[dict[str, Any]]:
        track = 0
        with open(path, "rb") as file:
            while line := file.readline(LINE_BYTES):
                value = _parsed(line)
                if HEADER in value:
                    if value[HEADER] != VERSION:
                        raise UsageError(f"{path} is an event log of version {value[HEADER]}", hint="update Millrace")
                    track, names = self._track(value)
                    yield from names
                elif not track:
                    raise UsageError(f"{path} is no event log: it has no header")
                elif _is_event(value):
                    yield _complete(value, track)
                else:
                    self.skipped += 1

    def _track(self, header: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        key = (str(header.get("host")), int(header.get("pid") or 0))
        known = self.tracks.get(key)
        if known is not None:
            return known, []
        number = self.tracks[key] = len(self.tracks) + 1
        rank = int(header.get("rank") or 0)
        name = f"rank {rank} (process {key[1]} on {key[0]})"
        about = [("process_name", {"name": name}), ("process_sort_index", {"sort_index": rank})]
        return number, [{"ph": "M", "pid": number, "tid": 0, "name": n, "args": args} for n, args in about]


def _complete(value: dict[str, Any], track: int) -> dict[str, Any]:
    name = value["name"]
    return {
        "ph": "X",
        "name": name,
        "cat": name.partition(".")[0],
        "ts": value["ts"],
        "dur": value["dur"],
        "pid": track,
        "tid": value["tid"],
        "args": value.get("args", {}),
    }


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_event(value: dict[str, Any]) -> bool:
    numbers = (value.get("ts"), value.get("dur"), value.get("tid"))
    good = all(isinstance(n, int) and n >= 0 for n in numbers) and isinstance(value.get("args", {}), dict)
    return good and isinstance(value.get("name"), str)
