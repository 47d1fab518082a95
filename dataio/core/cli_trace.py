"""`headrace trace`: shows where ranks spent their time, and merges their event logs into one trace.

The trace is for Perfetto or chrome://tracing.

Invariants: files are read, and the trace is written, line by line, so memory does not grow with their size. Every
process of a host is one track, named after its rank. Only the result goes to standard output; with `--json` it is one
object.

Failure behaviour: a line that is not an event (usually the last one of a killed process) is skipped and counted. The
exit code is then 1. A file without a header is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from headrace.dataio.core.cli import argument, command, json_option, print_json
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.core.files import write_output
from headrace.dataio.core.time_breakdown import SAVE, WAIT, Process, by_name, trained
from headrace.dataio.core.tracing import HEADER, VERSION

LINE_BYTES = 64 << 10
PROCESSES = 1 << 16
SHOWN = 16
"""How many trainers and spans the tables show. `--json` prints all."""


@command(
    "trace",
    "Show from event logs (HEADRACE_EVENTS=DIR) where the time went. With -o, also write one trace for ui.perfetto.dev.",
    argument("files", nargs="+", type=Path, metavar="FILE", help="event logs, or directories of them"),
    argument("-o", "--output", type=Path, help="where to write the trace, in Chrome's JSON format"),
    json_option("the sums of every process as one JSON object"),
    epilog="exit codes: 0 done · 1 lines that are not events were skipped · 2 wrong use",
)
def trace(options: argparse.Namespace) -> int:
    """`headrace trace FILE...`"""
    reader = _Reader()
    try:
        with _output(options.output) as out:
            events = _write(out, reader.all(_event_logs(options.files)))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    processes = [process for _, process in reader.tracks.values()]
    if options.json:
        report = {"events": events, "skipped": reader.skipped, "processes": [process.shown() for process in processes]}
        print_json(report)
    else:
        destination = f"{options.output}: " if options.output else ""
        print(f"{destination}{events} events of {len(processes)} processes")
        print("\n".join(_table_lines(processes)))
    if reader.skipped:
        print(f"skipped {reader.skipped} lines that are not events", file=sys.stderr)
    return 1 if reader.skipped else 0


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        with open(os.devnull, "w") as out:
            yield out
    else:
        with write_output(path) as file, io.TextIOWrapper(file, "utf-8") as out:
            yield out


def _table_lines(processes: list[Process]) -> Iterator[str]:
    """Yield the lines of two tables: the trainers with the lowest goodput, and the spans that took the most time."""
    trainers = trained(processes)
    if trainers:
        yield f"\n{'rank':>5}  {'process':<24} {'seconds':>9} {'waited for data':>16} {'held by save':>13} {'goodput':>8}"
    worst = sorted(trainers, key=lambda process: process.goodput or 0.0)[:SHOWN]
    for process in trained(worst):
        shares = process.share(WAIT) or 0.0, process.share(SAVE) or 0.0, process.goodput or 0.0
        name = f"{process.pid} on {process.host}"
        yield f"{process.rank:>5}  {name:<24.24} {process.seconds:>9.1f} {shares[0]:>16.1%} {shares[1]:>13.1%} {shares[2]:>8.1%}"
    if len(trainers) > len(worst):
        yield f"  and {len(trainers) - len(worst)} that computed a larger share of their time (--json lists all)"
    spans = by_name(processes)
    if spans:
        yield f"\n{'span':<24} {'times':>9} {'seconds':>10} {'mean ms':>9} {'longest ms':>11}  most in"
    for name, (total, worst_process) in list(spans.items())[:SHOWN]:
        mean, longest = total.total / total.count / 1e3, total.longest / 1e3
        longest_in = f"rank {worst_process.rank} ({worst_process.pid} on {worst_process.host})"
        yield f"{_printable(name):<24.24} {total.count:>9} {total.total / 1e6:>10.2f} {mean:>9.2f} {longest:>11.1f}  {longest_in}"
    if len(spans) > SHOWN:
        yield f"  and {len(spans) - SHOWN} more (--json lists all)"


def _event_logs(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted([*path.glob("*.jsonl.1"), *path.glob("*.jsonl")])
        elif path.is_file():
            files.append(path)
        else:
            raise NotFoundError(f"there is no {path}", hint="name event logs, or the directory of HEADRACE_EVENTS")
    if not files:
        raise NotFoundError("these directories hold no event logs", hint="set HEADRACE_EVENTS=DIR for the trainers")
    return files


def _write(out: TextIO, events: Iterable[dict[str, Any]]) -> int:
    count, separator = 0, "\n"
    out.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in events:
        out.write(separator + json.dumps(event))
        count, separator = count + (event["ph"] == "X"), ",\n"
    out.write("\n]}\n")
    return count


class _Reader:
    """Reads event logs. `tracks` has the track number and the sums of each process."""

    def __init__(self) -> None:
        self.tracks: dict[tuple[str, int], tuple[int, Process]] = {}
        self.skipped = 0

    def all(self, files: Iterable[Path]) -> Iterator[dict[str, Any]]:
        for path in files:
            yield from self._read_log(path)

    def _read_log(self, path: Path) -> Iterator[dict[str, Any]]:
        track: tuple[int, Process] | None = None
        with open(path, "rb") as log:
            while line := log.readline(LINE_BYTES):
                value = _parse(line)
                if HEADER in value:
                    if value[HEADER] != VERSION:
                        raise UsageError(f"{path} is an event log of version {value[HEADER]}", hint="update Headrace")
                    track, names = self._track(value)
                    yield from names
                elif track is None:
                    raise UsageError(f"{path} is not an event log: it has no header")
                elif _is_event(value):
                    track[1].add(value["name"], value["ts"], value["dur"])
                    yield _trace_event(value, track[0])
                else:
                    self.skipped += 1

    def _track(self, header: dict[str, Any]) -> tuple[tuple[int, Process], list[dict[str, Any]]]:
        key = (_printable(header.get("host")), _number_or_zero(header.get("pid")))
        existing = self.tracks.get(key)
        if existing is not None:
            return existing, []
        if len(self.tracks) >= PROCESSES:
            raise UsageError(f"these are logs of more than {PROCESSES} processes", hint="name fewer of them at once")
        rank = _number_or_zero(header.get("rank"))
        number = len(self.tracks) + 1
        track = self.tracks[key] = number, Process(rank, key[1], key[0])
        name = f"rank {rank} (process {key[1]} on {key[0]})"
        metadata = [("process_name", {"name": name}), ("process_sort_index", {"sort_index": rank})]
        return track, [{"ph": "M", "pid": number, "tid": 0, "name": n, "args": args} for n, args in metadata]


def _number_or_zero(value: object) -> int:
    """Return a number from a header; 0 if it is invalid."""
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def _printable(value: object) -> str:
    """Make a text from a file safe for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:200])


def _trace_event(value: dict[str, Any], track: int) -> dict[str, Any]:
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


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_event(value: dict[str, Any]) -> bool:
    numbers = (value.get("ts"), value.get("dur"), value.get("tid"))
    good = all(isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers) and isinstance(value.get("args", {}), dict)
    return good and isinstance(value.get("name"), str)
