"""`headrace doctor URL`: checks whether a store is reachable and supports datasets and shared checkpoints.

With `--memory` it instead runs `headrace.checkpoint.saving.copy_threads`, a separate program that measures how fast
this machine copies a state.

Invariants: the command writes only under a random prefix. It deletes its objects, also after a failed check, and the
folders that it created. With `--json`, exactly one JSON object goes to standard output.

Failure behaviour: a store that cannot be used raises its error (exit codes of `headrace.dataio.cli`). A store that
works, but not for several writers, gets its report and the exit code of `UnsupportedError`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import subprocess
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.dataio.core.cli import argument, command, json_option, positive_int, print_json
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.core.programs import environment, run_module
from headrace.dataio.store.base import Store
from headrace.dataio.store.hidden_files import TEMPORARY
from headrace.dataio.store.open import open_store
from headrace.dataio.store.probe import certify, probe_preconditions

_COPIES = "headrace.checkpoint.saving.copy_threads"
_MULTIPART_BYTES = 9 << 20  # more than one part


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    seconds: float
    detail: str = ""


def _up_to_thousand(text: str) -> int:
    return positive_int(text, 1000)


@command(
    "doctor",
    "Check whether a store supports what datasets and shared checkpoints need.",
    argument("url", nargs="?", help="a path, file:///path or s3://bucket/prefix"),
    argument(
        "--memory",
        action="store_true",
        help="instead, measure how fast this machine copies a state, and advise settings",
    ),
    argument("--certify", action="store_true", help="also let many writers race for one key, several times"),
    argument("--writers", type=_up_to_thousand, default=50, help="writers in a race (default: 50)"),
    argument("--rounds", type=_up_to_thousand, default=5, help="races (default: 5)"),
    json_option("the report as one JSON object"),
    epilog="exit codes: 0 good for everything · 2 wrong use, no access, or not for several writers · 3 unreachable",
)
def doctor(options: argparse.Namespace) -> int:
    """`headrace doctor URL`"""
    if options.memory:
        return subprocess.call(run_module(_COPIES, *(["--json"] if options.json else [])), env=environment())
    if options.url is None:
        raise UsageError("give the URL of a store, or --memory", hint="see headrace doctor --help")
    with open_store(options.url) as store, _no_new_folders(store.location.url):
        checks = _examine(store, options.rounds if options.certify else 0, options.writers)
        _print(store, checks, options)
    return 0 if all(check.ok for check in checks) else UnsupportedError.exit_code


def _examine(store: Store, rounds: int, writers: int) -> list[Check]:
    scratch = f"headrace-doctor-{uuid.uuid4().hex}"
    try:
        checks = [_timed(name, functools.partial(step, store, scratch)) for name, step in _STEPS]
        if rounds and all(check.ok for check in checks):
            checks.append(_timed(f"{writers} writers racing", lambda: _race_writers(store, scratch, writers, rounds)))
        return checks
    finally:
        _clear(store, scratch)


@contextlib.contextmanager
def _no_new_folders(url: str) -> Iterator[None]:
    """At the end, remove the folders that the block created, unless they have content.

    A store in a directory creates them with its first object.
    """
    created = list[Path]()
    if url.startswith("file://"):
        folder = Path(urllib.parse.unquote(url.removeprefix("file://"), errors="surrogateescape"))
        created = [*itertools.takewhile(lambda path: not path.exists(), [folder / TEMPORARY, folder, *folder.parents])]
    try:
        yield
    finally:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()


def _timed(name: str, step: Callable[[], tuple[bool, str]]) -> Check:
    began = time.monotonic()
    ok, detail = step()
    return Check(name, ok, time.monotonic() - began, detail)


def _write_and_read(store: Store, scratch: str) -> tuple[bool, str]:
    body = os.urandom(4096)
    store.put(f"{scratch}/object", body)
    if store.get(f"{scratch}/object") != body:
        raise CorruptionError(
            f"{store.location.url}: the bytes read differ from those written", hint="do not use this store"
        )
    return True, ""


def _ranges(store: Store, scratch: str) -> tuple[bool, str]:
    body, part = os.urandom(4096), bytearray(100)
    store.put(f"{scratch}/ranges", body)
    try:
        store.get_into(f"{scratch}/ranges", 1001, memoryview(part))
    except UnsupportedError as error:
        return False, error.message
    return part == body[1001:1101], "the bytes of a range are wrong" if part != body[1001:1101] else ""


def _multipart(store: Store, scratch: str) -> tuple[bool, str]:
    key, body = f"{scratch}/multipart", os.urandom(_MULTIPART_BYTES)
    store.put_multipart(key, [body[:100], body[100:]])
    ok = store.get(key) == body
    return ok, "" if ok else "the bytes read differ from those written in parts"


def _list_and_delete(store: Store, scratch: str) -> tuple[bool, str]:
    listed = [info.key for info in store.list(scratch)]
    store.delete_many(listed)
    remaining = [info.key for info in store.list(scratch)]
    ok = bool(listed) and listed == sorted(listed) and not remaining
    return ok, "" if ok else f"the listing showed {len(listed)} objects before and {len(remaining)} after deleting them"


def _preconditions(store: Store, scratch: str) -> tuple[bool, str]:
    result = probe_preconditions(store, scratch)
    return result.supported, result.reason


_STEPS: list[tuple[str, Callable[[Store, str], tuple[bool, str]]]] = [
    ("write and read", _write_and_read),
    ("ranged read", _ranges),
    ("multipart upload", _multipart),
    ("list and delete", _list_and_delete),
    ("conditional write", _preconditions),
]


def _race_writers(store: Store, scratch: str, writers: int, rounds: int) -> tuple[bool, str]:
    races = list(certify(store, scratch, writers, rounds))
    unfair = [race.winners for race in races if not race.fair]
    if unfair:
        return False, f"{len(unfair)} of {rounds} races did not have exactly one winner: {unfair}"
    return True, f"exactly one winner in each of {rounds} races"


def _clear(store: Store, scratch: str) -> None:
    """Delete the objects of a failed check. An error here must not hide the check's own error."""
    try:
        store.delete_many([info.key for info in store.list(scratch)])
    except HeadraceError:
        return


def _verdict(store: Store, checks: Sequence[Check]) -> str:
    failed = [check.name for check in checks if not check.ok]
    if not failed and store.location.url.startswith("memory:"):
        return "good for experiments; no other process sees it"
    if not failed:
        return "good for datasets and for checkpoints with several writers"
    if failed == ["conditional write"]:
        return "good for reading and for a single writer; several writers would overwrite each other"
    return "not good for Headrace: " + ", ".join(failed) + " failed"


def _print(store: Store, checks: Sequence[Check], options: argparse.Namespace) -> None:
    ok = all(check.ok for check in checks)
    if options.json:
        report = {
            "url": store.location.url,
            "ok": ok,
            "verdict": _verdict(store, checks),
            "checks": [*map(asdict, checks)],
        }
        print_json(report)
        return
    print(store.location.url, *filter(None, [store.location.options.get("endpoint_url")]))
    for check in checks:
        print(f"  {'ok    ' if check.ok else 'FAILED'} {check.name:24} {check.seconds * 1000:8.0f} ms  {check.detail}")
    print(f"verdict: {_verdict(store, checks)}")
    if ok and not options.certify:
        print("  next: --certify also lets 50 writers race for one key")
