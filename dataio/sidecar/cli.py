"""`headrace sidecar run`, `headrace sidecar status` and `headrace sidecar forget`.

Invariant: `forget` removes nothing without `--apply`, and with it exactly the steps that it lists.
Failure behaviour: `NotFoundError` when no daemon answers, the daemon has no local tier, or no kept step matches.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.dataio.core import log
from headrace.dataio.core.cli import apply_option, command, json_option
from headrace.dataio.core.errors import NotFoundError, TransientError
from headrace.dataio.core.programs import run_module
from headrace.dataio.sidecar import settings, systemd

if TYPE_CHECKING:
    from headrace.dataio.store.local_tier.records import Record

COMMANDS: dict[str, Sequence[str]] = {"checkpoint": run_module("headrace.checkpoint.saving.commit_worker")}
"""The command that runs a staged job, by the job's kind. It names the module, which this layer must not import."""


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="run the daemon in the foreground until SIGTERM, which drains it")
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
    status = actions.add_parser("status", help="show the running daemon's status; exit code 2 when none is running")
    status.add_argument("--watch", action="store_true", help="show it again every 2 seconds, until interrupted")
    forget = actions.add_parser("forget", help="remove steps from the node's tier; only lists them without --apply")
    forget.add_argument("run", help="the run's name")
    forget.add_argument("--step", type=int, help="only this step")
    apply_option("remove them, also where the store may have no copy")(forget)
    for action in (status, forget):
        action.add_argument("--socket", type=Path, help="the daemon's socket (default: found as loaders find it)")
        json_option()(action)


@command("sidecar", "Run the node's daemon, which shares a cache and stages checkpoints, or ask it.", _add_actions)
def sidecar(options: argparse.Namespace) -> int:
    """`headrace sidecar run | status | forget`"""
    return {"run": _run, "status": _status, "forget": _forget}[options.action](options)


def _run(options: argparse.Namespace) -> int:
    from headrace.dataio.sidecar.daemon import Daemon
    from headrace.dataio.store.open import open_location

    flags = {name: text for name, text in vars(options).items() if name != "action" and text is not None}
    configured = settings.read(flags, commands=COMMANDS)
    log.setup(configured.log_level)
    daemon = Daemon(configured.config, open_location, lambda: settings.read(flags, commands=COMMANDS).config)
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
        raise NotFoundError("this sidecar has no local tier", hint="see tier_dir in docs/reference/sidecar.md")
    local_tier = LocalTier(Path(tier["directory"]), TierLimits(tier["budget_bytes"], tier["steps"]))
    chosen = [r for r in local_tier.records(run=options.run) if options.step in (None, r.step)]
    if not chosen:
        raise NotFoundError(
            f"the local tier keeps no such step of run {options.run}", hint="see headrace sidecar status"
        )
    if options.apply:
        local_tier.forget(chosen)
    print(json.dumps([_line(r) for r in chosen]) if options.json else _text(chosen, options.apply))
    return 0


def _line(record: Record) -> dict[str, object]:
    return {"run": record.run, "step": record.step, "rank": record.rank, "committed": record.committed > 0}


def _text(records: list[Record], removed: bool) -> str:
    lines = [
        f"step {r.step} of run {r.run}, rank {r.rank}: " + ("committed" if r.committed else "NOT KNOWN TO BE COMMITTED")
        for r in records
    ]
    return "\n".join([*lines, "removed" if removed else "nothing was removed; --apply removes them"])
