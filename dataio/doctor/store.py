"""The checks of a store: is it reachable, how fast does it answer, and does it support datasets and shared checkpoints?

Invariants: the checks write only under a random prefix. They delete their objects, also after a failed check, and the
folders that they created. Each check ends after `STEP_SECONDS` at the latest.
Failure behaviour: an error of the store ends the checks. It is returned beside the findings, so the command exits with
its code. A store that works, but not for several writers, gets an `error` for its conditional writes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.dataio.core.errors import CorruptionError, HeadraceError, TransientError, UnsupportedError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.redact import redact
from headrace.dataio.doctor.findings import Finding, run
from headrace.dataio.store.base import Store
from headrace.dataio.store.hidden_files import TEMPORARY
from headrace.dataio.store.open import open_store
from headrace.dataio.store.probe import certify, probe_preconditions

STEP_SECONDS = 300.0
"""Longer than a store's own retries take."""
SLOW_SECONDS = 0.5
SKEW_SECONDS = 30.0
"""A difference of the clocks above which leases may be judged wrongly. S3 refuses requests from 900 seconds on."""
_READS = 5
_MULTIPART_BYTES = 9 << 20  # more than one part


@dataclass(slots=True)
class Examined:
    """The result for one store. `error` is the store's error that ended the checks."""

    url: str
    endpoint: str = ""
    findings: list[Finding] = field(default_factory=list)
    verdict: str = ""
    error: HeadraceError | None = None


def examine(
    url: str, *, rounds: int = 0, writers: int = 50, started: Callable[[int, int], None] | None = None
) -> Examined:
    """Check the store at `url`.

    Args:
        url: The store's address.
        rounds: How often `writers` writers race for one key; 0 for never.
        writers: The number of writers in a race.
        started: Gets the number of checks that are done and their total, for a progress bar.

    Returns:
        The findings and a verdict. If the address is invalid, one finding says so.
    """
    opened = _opened(url)
    if isinstance(opened, Examined):
        return opened
    with opened as store, _no_new_folders(store.location.url):
        examined = Examined(store.location.url, str(store.location.options.get("endpoint_url") or ""))
        _examine(store, examined, rounds, writers, started or (lambda _done, _total: None))
        examined.verdict = _verdict(examined)
    return examined


def _opened(url: str) -> Store | Examined:
    """The store, or the result if it cannot be opened. A path on a dead mount does not answer."""
    stores, refused = list[Store](), Examined(redact(url), verdict="it cannot be opened")

    def opening() -> tuple[Finding, ...]:
        stores.append(open_store(url))
        return (Finding("address", "ok"),)

    refused.findings = _bounded("address", opening, refused)
    return stores[0] if refused.error is None else refused


def _examine(store: Store, examined: Examined, rounds: int, writers: int, started: Callable[[int, int], None]) -> None:
    scratch = f"headrace-doctor-{uuid.uuid4().hex}"
    steps: list[tuple[str, Callable[[], tuple[Finding, ...]]]]
    steps = [(name, functools.partial(step, store, scratch)) for name, step in _STEPS]
    if rounds:
        steps.append((f"{writers} writers racing", lambda: _race_writers(store, scratch, writers, rounds)))
    try:
        for number, (name, step) in enumerate(steps):
            started(number, len(steps))
            if "racing" in name and any(found.severity == "error" for found in examined.findings):
                return
            examined.findings += _bounded(name, step, examined)
            if examined.error is not None:
                return
    finally:
        run("clean-up", lambda: _clear(store, scratch), STEP_SECONDS)


def _bounded(name: str, step: Callable[[], tuple[Finding, ...]], examined: Examined) -> list[Finding]:
    def checked() -> tuple[Finding, ...]:
        try:
            with naming_extras():
                return step()
        except HeadraceError as error:
            examined.error = error
            raise

    found = run(name, checked, STEP_SECONDS)
    if found[0].severity == "unknown" and examined.error is None:
        examined.error = TransientError(
            f"{examined.url}: {name}: {found[0].message}", hint="see whether the server answers"
        )
    return found


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


def _answer(name: str, ok: bool, failure: str, advice: str = "do not use this store") -> tuple[Finding, ...]:
    return (Finding(name, "ok") if ok else Finding(name, "error", failure, advice),)


def _write_and_read(store: Store, scratch: str) -> tuple[Finding, ...]:
    """Write an object and read it several times: the bytes, the latency, and the server's clock."""
    key, body, seconds = f"{scratch}/object", os.urandom(4096), list[float]()
    store.put(key, body)
    written = time.time()
    for _ in range(_READS):
        began = time.monotonic()
        if store.get(key) != body:
            raise CorruptionError(
                f"{store.location.url}: the bytes read differ from those written", hint="do not use this store"
            )
        seconds.append(time.monotonic() - began)
    return (
        Finding("write and read", "ok"),
        judge_latency(statistics.median(seconds)),
        judge_clock(store.stat(key).modified - written),
    )


def judge_latency(seconds: float) -> Finding:
    message = f"median of {_READS} reads of 4 KiB: {1000 * seconds:.1f} ms"
    if seconds > SLOW_SECONDS:
        return Finding(
            "latency", "note", message, "raise fetch_memory and prefetch_batches: more requests must be in flight"
        )
    return Finding("latency", "ok", message)


def judge_clock(difference: float) -> Finding:
    """`difference`: the store's clock minus this node's, in seconds."""
    if not abs(difference) < 1e9:  # a store without modification times
        return Finding("clock of the store", "unknown", "the store does not tell it")
    message = f"{abs(difference):.0f} seconds {'ahead of' if difference > 0 else 'behind'} this node's"
    if abs(difference) > SKEW_SECONDS:
        advice = "set the clocks by NTP: leases of checkpoints compare them, and S3 refuses requests with a wrong time"
        return Finding("clock of the store", "warning", message, advice)
    return Finding("clock of the store", "ok", message)


def _ranges(store: Store, scratch: str) -> tuple[Finding, ...]:
    body, part = os.urandom(4096), bytearray(100)
    store.put(f"{scratch}/ranges", body)
    try:
        store.get_into(f"{scratch}/ranges", 1001, memoryview(part))
    except UnsupportedError as error:
        return _answer("ranged read", False, error.message, "use a server that supports ranged reads")
    return _answer("ranged read", part == body[1001:1101], "the bytes of a range are wrong")


def _multipart(store: Store, scratch: str) -> tuple[Finding, ...]:
    key, body = f"{scratch}/multipart", os.urandom(_MULTIPART_BYTES)
    store.put_multipart(key, [body[:100], body[100:]])
    return _answer("multipart upload", store.get(key) == body, "the bytes read differ from those written in parts")


def _list_and_delete(store: Store, scratch: str) -> tuple[Finding, ...]:
    listed = [info.key for info in store.list(scratch)]
    store.delete_many(listed)
    remaining = [info.key for info in store.list(scratch)]
    failure = f"the listing showed {len(listed)} objects before and {len(remaining)} after deleting them"
    return _answer("list and delete", bool(listed) and listed == sorted(listed) and not remaining, failure)


def _preconditions(store: Store, scratch: str) -> tuple[Finding, ...]:
    result = probe_preconditions(store, scratch)
    advice = "give each writer a repository of its own, or use a server that supports If-None-Match"
    return _answer("conditional write", result.supported, result.reason, advice)


_STEPS: list[tuple[str, Callable[[Store, str], tuple[Finding, ...]]]] = [
    ("write and read", _write_and_read),
    ("ranged read", _ranges),
    ("multipart upload", _multipart),
    ("list and delete", _list_and_delete),
    ("conditional write", _preconditions),
]


def _race_writers(store: Store, scratch: str, writers: int, rounds: int) -> tuple[Finding, ...]:
    races = list(certify(store, scratch, writers, rounds))
    unfair = [race.winners for race in races if not race.fair]
    name = f"{writers} writers racing"
    if unfair:
        failure = f"{len(unfair)} of {rounds} races did not have exactly one winner: {unfair}"
        return _answer(name, False, failure, "give each writer a repository of its own")
    return (Finding(name, "ok", f"exactly one winner in each of {rounds} races"),)


def _clear(store: Store, scratch: str) -> tuple[Finding, ...]:
    """Delete the objects of a failed check. An error here must not hide the check's own error."""
    try:
        store.delete_many([info.key for info in store.list(scratch)])
    except HeadraceError:
        return ()
    return ()


def _verdict(examined: Examined) -> str:
    failed: Sequence[str] = [found.name for found in examined.findings if found.severity == "error"]
    if examined.error is not None:
        return "it cannot be used now"
    if not failed and examined.url.startswith("memory:"):
        return "good for experiments; no other process sees it"
    if not failed:
        return "good for datasets and for checkpoints with several writers"
    if failed == ["conditional write"]:
        return "good for reading and for a single writer; several writers would overwrite each other"
    return "not good for Headrace: " + ", ".join(failed) + " failed"
