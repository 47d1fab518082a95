"""`millrace sidecar run` and `millrace sidecar status`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dataio.core import log
from dataio.core.errors import NotFoundError, TransientError
from dataio.core.limits import format_bytes
from dataio.sidecar import settings
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
    run.add_argument(
        "--config", metavar="FILE", help="TOML with the same names as the flags, _ for -; SIGHUP reads it again"
    )
    for setting in settings.SETTINGS:
        default = f" ({setting.default})" if setting.default else ""
        flag = "--" + setting.name.replace("_", "-")
        run.add_argument(flag, dest=setting.name, metavar=setting.metavar, help=setting.help + default)
    status = actions.add_parser("status", help="ask the running daemon; exit code 2 when there is none")
    status.add_argument("--socket", type=Path)
    status.add_argument("--json", action="store_true")
    return parser


def _run(options: argparse.Namespace) -> int:
    from dataio.sidecar.server import Daemon
    from dataio.store.open import open_location

    given = {name: text for name, text in vars(options).items() if name != "action" and text is not None}
    found = settings.read(given, commands=COMMANDS)
    log.setup(found.log_level)
    daemon = Daemon(found.config, open_location, lambda: settings.read(given, commands=COMMANDS).config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        drained = runner.run(daemon.serve())
    return 0 if drained else TransientError.exit_code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    try:
        loops = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = loops.new_event_loop
    return factory


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
