"""`headrace sidecar run`, `headrace sidecar status` and `headrace sidecar forget`.

Invariant: `forget` removes nothing without `--apply`, and with it exactly the steps that it lists.
Failure behaviour: `NotFoundError` when no daemon answers, the daemon has no local tier, or no kept step matches.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.dataio.core import log
from headrace.dataio.core.cli import Parser
from headrace.dataio.core.errors import NotFoundError, TransientError
from headrace.dataio.sidecar import settings, systemd

if TYPE_CHECKING:
    from headrace.dataio.store.local_tier.records import Record

COMMANDS: dict[str, Sequence[str]] = {"checkpoint": (sys.executable, "-m", "headrace.checkpoint.saving.commit_worker")}
"""The command that runs a staged job, by its kind. A string, since this layer must not import what it starts."""


def sidecar(argv: list[str]) -> int:
    """Entry point of `headrace sidecar`."""
    options = _parser().parse_args(argv)
    return {"run": _run, "status": _status, "forget": _forget}[options.action](options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="headrace sidecar",
        description="Run or query the node's daemon, which caches shards and commits staged checkpoints.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run the daemon in the foreground; SIGTERM drains and stops it")
    run.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with the same names as the flags, with _ for -; SIGHUP reads it again",
    )
    for setting in settings.SETTINGS:
        default = f" ({setting.default})" if setting.default else ""
        flag = "--" + setting.name.replace("_", "-")
        run.add_argument(
            flag, dest=setting.name, metavar=setting.metavar, help=(setting.help + default).replace("%", "%%")
        )
    status = actions.add_parser("status", help="show the status of the running daemon; exit code 2 if none is running")
    status.add_argument("--socket", type=Path)
    status.add_argument("--json", action="store_true", help="print the full status as one JSON object")
    status.add_argument("--watch", action="store_true", help="refresh every 2 seconds until interrupted")
    forget = actions.add_parser("forget", help="remove kept steps from the local tier; without --apply only list them")
    forget.add_argument("run", help="name of the run")
    forget.add_argument("--step", type=int, help="only this step")
    forget.add_argument("--apply", action="store_true", help="remove them, even if the store may have no copy")
    forget.add_argument("--socket", type=Path)
    forget.add_argument("--json", action="store_true")
    return parser


def _run(options: argparse.Namespace) -> int:
    from headrace.dataio.sidecar.daemon import Daemon
    from headrace.dataio.store.open import open_location

    given = {name: text for name, text in vars(options).items() if name != "action" and text is not None}
    found = settings.read(given, commands=COMMANDS)
    log.setup(found.log_level)
    daemon = Daemon(found.config, open_location, lambda: settings.read(given, commands=COMMANDS).config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        drained = runner.run(daemon.serve(systemd.ready))
    return 0 if drained else TransientError.exit_code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop if uvloop is installed, else None."""
    try:
        loops = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = loops.new_event_loop
    return factory


def _status(options: argparse.Namespace) -> int:
    from headrace.dataio.sidecar import cli_status

    return cli_status.status(options)


def _forget(options: argparse.Namespace) -> int:
    from headrace.dataio.sidecar.cli_status import ask
    from headrace.dataio.store.local_tier.records import TierLimits
    from headrace.dataio.store.local_tier.tier import LocalTier

    tier = ask(options).get("tier")
    if not tier:
        raise NotFoundError("this sidecar has no local tier", hint="see tier_dir in docs/sidecar.md")
    shelf = LocalTier(Path(tier["directory"]), TierLimits(tier["budget_bytes"], tier["steps"]))
    chosen = [r for r in shelf.records(run=options.run) if options.step in (None, r.step)]
    if not chosen:
        raise NotFoundError(
            f"the local tier keeps no such step of run {options.run}", hint="see headrace sidecar status"
        )
    if options.apply:
        shelf.forget(chosen)
    print(json.dumps([_line(r) for r in chosen]) if options.json else _text(chosen, options.apply))
    return 0


def _line(record: Record) -> dict[str, object]:
    return {"run": record.run, "step": record.step, "rank": record.rank, "committed": record.committed > 0}


def _text(records: list[Record], done: bool) -> str:
    lines = [
        f"step {r.step} of run {r.run}, rank {r.rank}: " + ("committed" if r.committed else "NOT KNOWN TO BE COMMITTED")
        for r in records
    ]
    return "\n".join([*lines, "removed" if done else "nothing was removed: add --apply"])
