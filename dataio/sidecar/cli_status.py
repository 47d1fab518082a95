"""`headrace sidecar status`: the contents of the status page, in the terminal.

Invariant: text from the daemon is printed as text, never as markup or control characters.
Failure behaviour: `NotFoundError` when no daemon answers, `AccessDeniedError` when this user may not connect. With
`--watch` the error is shown and the command tries again. Fields that an older daemon does not send are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.dataio.core.errors import HeadraceError, NotFoundError, translate_os_errors
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.sidecar.connection import Sidecar
from headrace.dataio.sidecar.paths import default_socket

WATCH_SECONDS = 2.0
PIPE_WIDTH = 200
"""Columns when the output is not a terminal."""
State = dict[str, Any]


def status(options: argparse.Namespace) -> int:
    """`headrace sidecar status`; `options` has socket, json and watch."""
    if options.watch and not options.json:
        return _watch(options)
    state = ask(options)
    if options.json:
        print(json.dumps(state))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        console.print(view(state))
    return 0


def ask(options: argparse.Namespace) -> State:
    """The status of the daemon on `options.socket`, or on the default socket."""
    connection = Sidecar.find(options.socket or "auto")
    if connection is None:
        socket_path = options.socket or default_socket()
        with translate_os_errors(f"asking at {socket_path}"), contextlib.suppress(FileNotFoundError):
            os.stat(socket_path)  # raises if this user may not access the directory
        raise NotFoundError(f"no sidecar answers on {socket_path}", hint="start one: headrace sidecar run")
    with connection:
        return connection.status()


def view(state: State) -> RenderableType:
    """The status as text and tables."""
    lines = [_head(state), _cache(state), *cache_lines(state), *_tier(state)]
    tables = [table for table in (_jobs(state), _saves(state)) if table.row_count]
    errors = [
        Text(f"{_clean(e['text'])}  {_ago(e['age_seconds'])}, {e['times']} times", "red")
        for e in state.get("errors", [])[:6]
    ]
    return Group(*lines, *tables, *errors)


def _watch(options: argparse.Namespace) -> int:
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            try:
                live.update(view(ask(options)), refresh=True)
            except HeadraceError as error:
                live.update(Text(f"{error}; trying again", "red"), refresh=True)
            time.sleep(WATCH_SECONDS)


def _head(state: State) -> Text:
    port = f", http://127.0.0.1:{state['http_port']}/" if state.get("http_port") else ""
    asking = any(client["pid"] == os.getpid() for client in state.get("client_list", []))  # this command
    clients = counted(state["clients"] - asking, "client")
    text = f"process {state['pid']} on {state['socket']}, up {_span(state['uptime_seconds'])}, {clients}"
    return Text(_clean(text + port + (", draining" if state["draining"] else "")))


def _cache(state: State) -> Text:
    cache = state["cache"]
    text = (
        f"cache   {format_bytes(cache['used_bytes'])} of {format_bytes(cache['budget_bytes'])} in {cache['files']} files, "
        f"{format_bytes(cache['fetched_bytes'])} fetched; {_reads(state)}, {cache['waiting']} requests waiting"
    )
    return Text(text + (", PAUSED: disk not writable" if cache["paused"] else ""))


def _reads(state: State) -> str:
    """The reads of the last minute. Without any, there is no share of hits.

    Loaders report their reads. One that ended before its first report has fetched bytes, but no reads.
    """
    rates = state.get("rates")
    if not rates:
        return "no reads yet"
    fetched = f"{_rate(rates.get('fetched_bytes_per_second'))} fetched"
    if rates.get("hit_ratio") is None:
        some = bool(rates.get("fetched_bytes_per_second"))
        return f"now {fetched}, no loader reports its reads" if some else f"now {fetched}, no reads in the last minute"
    return f"now {_rate(rates.get('cache_bytes_per_second'))} from cache, {fetched}, hits {_share(rates['hit_ratio'])}"


def cache_lines(state: State) -> list[Text]:
    """Lines about the tiers, prefetching, and jobs that fetch from stores.

    Tiers are listed if there are several, and prefetching once an announced read was requested.
    """
    return [*_tiers(state["cache"]), *_prefetch(state.get("prefetch", {})), *_fetching(state.get("fetching", {}))]


def _tiers(cache: State) -> list[Text]:
    tiers = cache.get("tiers", [])
    return [Text(_cache_tier(number, tier, cache)) for number, tier in enumerate(tiers) if len(tiers) > 1]


def _cache_tier(number: int, tier: State, cache: State) -> str:
    text = f"  tier {number}  {format_bytes(tier['used_bytes'])} of {format_bytes(tier['budget_bytes'])} "
    text += f"in {_clean(tier['directory'])}" + (f" ({_clean(tier['medium'])})" if "medium" in tier else "")
    if "hit_bytes" in tier:
        requested = cache.get("asked_bytes", 0)
        share = f" ({100 * tier['hit_bytes'] / requested:.1f} % of requested bytes)" if requested else ""
        text += f", {format_bytes(tier['hit_bytes'])} hits{share}"
    return text + (", PAUSED: disk not writable" if tier["paused"] else "")


_FEW_READS = 20
"""A share of fewer reads says nothing."""


def _prefetch(stats: State) -> list[Text]:
    ready, late = stats.get("reads_ready", 0), stats.get("reads_late", 0)
    if ready + late < _FEW_READS:
        return []
    text = (
        f"prefetch {ready} of {ready + late} reads were ready in time ({100 * ready / (ready + late):.1f} %); "
        f"{format_bytes(stats['window_bytes'])} may be in flight, {stats['hedged']} hedged"
    )
    if stats.get("forecasts"):
        error, worst = stats["forecast_error_median_s"], stats["forecast_error_p95_s"]
        when = "later" if error > 0 else "sooner"
        text += f"; needed {abs(error):.2g} s {when} than predicted, 95 % within {worst:.2g} s"
    return [Text(text)]


def _fetching(jobs: State) -> list[Text]:
    shown = sorted(jobs.items(), key=lambda entry: -entry[1]["waiting"])[:6]
    text = ", ".join(
        f"{_clean(name)} {fetches['connections']} ({format_bytes(fetches['bytes_in_flight'])}), {fetches['waiting']} waiting"
        for name, fetches in shown
    )
    return [Text(f"stores  {text}")] if text else []


def _tier(state: State) -> list[Text]:
    tier = state.get("tier")
    if not tier:
        return []
    steps = ", ".join(_step(step) for step in tier["kept"][:6])
    medium = f" in {_clean(tier['medium'])}" if "medium" in tier else ""
    size = f"{format_bytes(tier['used_bytes'])} of {format_bytes(tier['budget_bytes'])}{medium}"
    text = f"tier    {size}, steps: {steps or 'none'}"
    lines = [Text(text + (f", UNUSABLE: {_clean(tier['trouble'])}" if tier["trouble"] else ""))]
    if tier["buddy"]:
        lines.append(_buddy(tier["buddy"]))
    if tier["guests"]:
        refused = sum(tier["guests"]["refused"].values())
        lines.append(
            Text(f"guests  port {tier['guests']['port']}, {tier['guests']['peers']} connected, {refused} refused")
        )
    return lines


def _step(step: State) -> str:
    """The run and the step, with notes: whether the step is committed, and how many ranks' parts are copied."""
    notes = [] if step["committed"] else ["not committed"]
    if step["guest"]:
        notes.append("for a buddy")
    elif step.get("copied") is not None:
        complete = step["copied"] >= step["ranks"]
        notes.append("copied" if complete else f"{step['copied']} of {step['ranks']} ranks copied")
    return _clean(f"{step['run']} {step['step']}" + (f" ({', '.join(notes)})" if notes else ""))


def _buddy(buddy: State) -> Text:
    copies = ", ".join(f"{_clean(c['run'])} {c['step']} of {_ago(c['age_seconds'])}" for c in buddy["copies"][:6])
    trouble = f", GETS NO COPIES: {_clean(buddy['trouble'])}" if buddy["trouble"] else ""
    text = (
        f"buddy   {_clean(buddy['address'])} has {copies or 'nothing of this daemon yet'}, {buddy['waiting']} waiting"
    )
    return Text(text + trouble)


def _jobs(state: State) -> Table:
    table = _table(
        "job", "trainers", "goodput", "samples/s", "wait/step", "stall/step", "cache", "store", "last step", "age"
    )
    for job in state.get("training", []):
        table.add_row(
            Text(_clean(job["job"])),
            str(job["trainers"]),
            _share(job["goodput"]),
            _number(job["samples_per_second"]),
            _ms(job["wait_ms_per_step"]),
            _ms(job["stall_ms_per_step"]),
            _rate(job["cache_bytes_per_second"]),
            _rate(job["store_bytes_per_second"]),
            "–" if job["last_step"] is None else str(job["last_step"]),
            _span(job["last_commit_age_seconds"]),
        )
    if (missing := state.get("training_jobs", 0) - table.row_count) > 0:
        table.add_row(Text(f"… and {missing} more"))  # a message of the socket has no room for them
    return table


def _saves(state: State) -> Table:
    table = _table("checkpoint", "state", "done", "seconds", "ended")
    for save in state.get("saves", [])[:8]:
        over = save["state"] in ("committed", "failed")
        share = "" if over or not save["total"] else f"{100 * save['done'] // save['total']} %"
        description = _clean(save["about"]) + (f": {_clean(save['error'])}" if save["error"] else "")
        table.add_row(
            Text(description), save["state"], share, _number(save["seconds"]), _ago(save["age_seconds"]) if over else ""
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, min_width=12, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _clean(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(text))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.1f} MB/s"


def _ago(seconds: float) -> str:
    return f"{_span(seconds)} ago"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
