"""`headrace sidecar run`, `headrace sidecar status` and `headrace sidecar forget`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.dataio.core import log
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.options import Parser
from headrace.dataio.sidecar import notify, settings

COMMANDS: dict[str, Sequence[str]] = {"checkpoint": (sys.executable, "-m", "headrace.checkpoint.carry")}
"""What carries out a staged job, by its kind. Named here by a string: this floor knows nothing of what it starts."""


def sidecar(argv: list[str]) -> int:
    """The sub-command's entry point."""
    options = _parser().parse_args(argv)
    return {"run": _run, "status": _status, "forget": _forget}[options.action](options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="headrace sidecar", description="The node's daemon: shared cache and staged checkpoints.")
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run the daemon in the foreground until SIGTERM, which drains it")
    run.add_argument(
        "--config", metavar="FILE", help="TOML with the same names as the flags, _ for -; SIGHUP reads it again"
    )
    for setting in settings.SETTINGS:
        default = f" ({setting.default})" if setting.default else ""
        flag = "--" + setting.name.replace("_", "-")
        run.add_argument(
            flag, dest=setting.name, metavar=setting.metavar, help=(setting.help + default).replace("%", "%%")
        )
    status = actions.add_parser("status", help="ask the running daemon; exit code 2 when there is none")
    status.add_argument("--socket", type=Path)
    status.add_argument("--json", action="store_true", help="everything, as one JSON object")
    status.add_argument("--watch", action="store_true", help="again every 2 seconds, until interrupted")
    forget = actions.add_parser("forget", help="remove kept steps from the node's tier; only lists them without --yes")
    forget.add_argument("run", help="the run's name")
    forget.add_argument("--step", type=int, help="this step alone")
    forget.add_argument("--yes", action="store_true", help="do it, also where the store may have no copy")
    forget.add_argument("--socket", type=Path)
    forget.add_argument("--json", action="store_true")
    return parser


def _run(options: argparse.Namespace) -> int:
    from headrace.dataio.sidecar.server import Daemon
    from headrace.dataio.store.open import open_location

    given = {name: text for name, text in vars(options).items() if name != "action" and text is not None}
    found = settings.read(given, commands=COMMANDS)
    log.setup(found.log_level)
    daemon = Daemon(found.config, open_location, lambda: settings.read(given, commands=COMMANDS).config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        drained = runner.run(daemon.serve(notify.ready))
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
    from headrace.dataio.sidecar import cli_status

    return cli_status.status(options)


def _forget(options: argparse.Namespace) -> int:
    from headrace.dataio.sidecar.tier.cli_forget import forget

    return forget(options)
