"""`millrace sidecar run` and `millrace sidecar status`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dataio.core import log
from dataio.core.errors import NotFoundError, TransientError, UsageError
from dataio.core.limits import format_bytes, parse_bytes
from dataio.sidecar.paths import default_socket

COMMANDS: dict[str, Sequence[str]] = {"checkpoint": (sys.executable, "-m", "checkpoint.carry")}
"""What carries out a staged job, by its kind. Named here by a string: this floor knows nothing of what it starts."""


def sidecar(argv: list[str]) -> int:
    """The sub-command's entry point."""
    options = _parser().parse_args(argv)
    return _run(options) if options.action == "run" else _status(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace sidecar", description="The node's daemon: shared cache and staged checkpoints."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run the daemon in the foreground until SIGTERM, which drains it")
    run.add_argument("--socket", type=Path, help="default: $MILLRACE_SIDECAR, or a private directory of this user")
    run.add_argument("--cache-dir", type=Path, help="default: a cache directory beside the socket's")
    run.add_argument("--cache-bytes", default="20GiB", metavar="SIZE", help="the most that the cache holds (20GiB)")
    run.add_argument("--http-port", default="0", metavar="N|off", help="status on 127.0.0.1: 0 takes any free port")
    run.add_argument("--drain-seconds", type=float, default=300.0, help="how long SIGTERM waits for checkpoints (300)")
    run.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    status = actions.add_parser("status", help="ask the running daemon; exit code 2 when there is none")
    status.add_argument("--socket", type=Path)
    status.add_argument("--json", action="store_true")
    return parser


def _run(options: argparse.Namespace) -> int:
    from dataio.sidecar.server import Config, Daemon
    from dataio.store.open import open_location

    log.setup(options.log_level)
    config = Config(
        socket=(options.socket or default_socket()).absolute(),
        cache_dir=(options.cache_dir or _default_cache()).absolute(),
        cache_bytes=parse_bytes(options.cache_bytes),
        http_port=_port(options.http_port),
        drain_seconds=options.drain_seconds,
        commands=COMMANDS,
    )
    drained = asyncio.run(Daemon(config, open_location).serve())
    return 0 if drained else TransientError.exit_code


def _default_cache() -> Path:
    import os

    return Path(tempfile.gettempdir()) / f"millrace-cache-{os.geteuid()}"


def _port(text: str) -> int | None:
    if text == "off":
        return None
    if text.isdecimal() and int(text) < 65536:
        return int(text)
    raise UsageError(f"{text!r} is no port", hint="give a number below 65536, 0 for any free one, or off")


def _status(options: argparse.Namespace) -> int:
    from dataio.sidecar.client import Sidecar

    found = Sidecar.find(options.socket or "auto")
    if found is None:
        raise NotFoundError(
            f"no sidecar answers on {options.socket or default_socket()}", hint="start one: millrace sidecar run"
        )
    with found:
        state = found.status()
    print(json.dumps(state) if options.json else _for_people(state))
    return 0


def _for_people(state: dict[str, object]) -> str:
    cache, jobs = state["cache"], state["jobs"]
    if not isinstance(cache, dict) or not isinstance(jobs, dict):
        raise TransientError("the sidecar's status is of another version")
    lines = [
        f"process {state['pid']} on {state['socket']}, up {state['uptime_seconds']} s"
        + (", draining" if state["draining"] else ""),
        f"cache   {format_bytes(cache['used_bytes'])} of {format_bytes(cache['budget_bytes'])} in {cache['files']} files, "
        f"{format_bytes(cache['fetched_bytes'])} fetched"
        + (", PAUSED: its disk cannot be written" if cache["paused"] else ""),
        f"clients {state['clients']}, stores {state['stores']}",
        f"jobs    {jobs['running']} running, {jobs['queued']} queued, {jobs['finished']} finished",
    ]
    for job in jobs["jobs"]:
        share = f" {100 * job['done'] // job['total']} %" if job["total"] else ""
        lines.append(
            f"  {job['token'][:8]} {job['kind']} {job['state']}{share} {format_bytes(job['arena_bytes'])} {job['error'] or ''}"
        )
    return "\n".join(lines)
