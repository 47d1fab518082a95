"""The daemon's local tier and its buddies: opening, cleaning up, status.

Purpose: one object that the daemon starts, queries and closes.
Invariants: the daemon's loop calls only `start`, `status`, `commands` and `close`. `recall` blocks the caller's thread.
A daemon without `tier_dir` has no `TierService`.
Failure behaviour: if the tier cannot be opened, the daemon does not start, because the tier was configured explicitly.
If the tier fails later, the service logs this once and shows it in the status, and workers save without the tier.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.files import storage_kind
from headrace.dataio.core.log import get_logger
from headrace.dataio.core.metrics import REGISTRY
from headrace.dataio.sidecar.metrics import TierMetrics
from headrace.dataio.sidecar.tier.buddy_fetch import BuddyFetch
from headrace.dataio.sidecar.tier.client import CopySender
from headrace.dataio.sidecar.tier.config import TierConfig, client_context
from headrace.dataio.sidecar.tier.server import BuddyServer
from headrace.dataio.store.local_tier.records import Record, TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier

TIDY_SECONDS = 5.0
WAITING = 16
"""Maximum number of `recall` calls that run at the same time. Further ones wait for a thread."""
LISTED = 16
"""Maximum number of steps in the status."""
_log = get_logger(__name__)


class TierService:
    """The tier, its buddy and its guests, from `start` to `close`."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config.check()
        self.local_tier = LocalTier(config.folder, TierLimits(config.bytes, config.steps))
        self._server = BuddyServer(config, self.local_tier) if config.listen is not None else None
        self._sending = CopySender(config, self.local_tier) if config.buddy is not None else None
        self._recalls = (
            BuddyFetch(config, self.local_tier, client_context(config)) if config.buddy is not None else None
        )
        self.pool = ThreadPoolExecutor(WAITING, thread_name_prefix="headrace-recall")
        """Threads for `recall`, which blocks."""
        self._medium = storage_kind(config.folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tidy_periodically, name="headrace-tier", daemon=True)
        self._port: int | None = None
        self._shown: dict[str, object] = {}
        self._metrics = TierMetrics(self.status)

    def start(self) -> None:
        """Start all threads; `UsageError` if the port for buddies is in use."""
        self._refresh()
        REGISTRY.register(self._metrics)
        if self._server is not None:
            self._port = self._server.start()
            _log.info("accepting copies from buddies on port %d", self._port)
        if self._sending is not None:
            self._sending.start()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(KeyError):  # the start failed
            REGISTRY.unregister(self._metrics)
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self._recalls is not None:
            self._recalls.close()
        if self._server is not None:
            self._server.close()
        if self._sending is not None:
            self._sending.close()
        self._thread.join(5)

    def commands(self, commands: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """The jobs' commands. The one for checkpoints gets further arguments, which describe the tier."""
        flags = ("--tier-dir", str(self.local_tier.root), "--tier-bytes", str(self.local_tier.limits.bytes))
        arguments = (*flags, "--tier-steps", str(self.local_tier.limits.steps))
        return {kind: (*command, *arguments) if kind == "checkpoint" else command for kind, command in commands.items()}

    def recall(self, source: str, key: str) -> bool:
        """Fetch an object from the buddy, or with an empty key the records of a store.

        Returns whether the tier has it now.
        """
        return self._recalls is not None and self._recalls.recall(source, key)

    @property
    def recalled(self) -> dict[str, int]:
        """Numbers of objects that were requested from the buddy, by outcome."""
        return dict(self._recalls.counts) if self._recalls is not None else {"found": 0, "absent": 0, "failed": 0}

    def status(self) -> dict[str, object]:
        """The status of the tier, the buddy and the guests, of bounded size."""
        return {**self._shown, "buddy": self._buddy(), "guests": self._guests(), "recalled": self.recalled}

    # internal

    def _tidy_periodically(self) -> None:
        while not self._stop.wait(TIDY_SECONDS / 5):
            self._refresh()

    def _refresh(self) -> None:
        """Update the data for `status`, and tidy the tier every `TIDY_SECONDS`."""
        trouble = ""
        try:
            if time.monotonic() - getattr(self, "_tidied", 0.0) > TIDY_SECONDS:
                self._tidied = time.monotonic()
                self.local_tier.create()  # a directory that was removed is a new, empty tier
                self.local_tier.tidy()
                if self._server is not None:
                    self._server.tidy()
            records, used = self.local_tier.records(), self.local_tier.used()
        except (OSError, HeadraceError) as error:
            trouble = str(getattr(error, "strerror", None) or error)
            if not self._shown.get("trouble"):
                _log.warning(
                    "the tier in %s cannot be used, saves go to the store only: %s", self.local_tier.root, trouble
                )
            records, used = [], 0
        self._shown = {
            "directory": str(self.local_tier.root),
            "medium": self._medium,
            "budget_bytes": self.local_tier.limits.bytes,
            "steps": self.local_tier.limits.steps,
            "used_bytes": used,
            "trouble": trouble,
            "kept": _steps(records, self._sending.has if self._sending is not None else None),
        }

    def _buddy(self) -> dict[str, object] | None:
        sending, now = self._sending, time.time()
        if sending is None:
            return None
        return {
            "address": str(self.config.buddy),
            "trouble": sending.trouble,
            "waiting": sending.waiting,
            "sent_bytes": sending.bytes,
            "copies": [
                {"run": run, "step": copy.step, "age_seconds": round(max(now - copy.created, 0.0), 1)}
                for run, copy in list(sending.copies.items())
            ],
        }

    def _guests(self) -> dict[str, object] | None:
        server = self._server
        if server is None:
            return None
        return {
            "port": self._port,
            "peers": server.peers,
            "received_bytes": server.received,
            "refused": dict(server.counts),
        }


def _steps(records: Sequence[Record], copied: Callable[[Record], bool] | None) -> list[dict[str, object]]:
    """The newest steps in the tier, one dictionary each.

    `copied` returns whether the buddy has a record; it is None without a buddy. In the result, `copied` counts the ranks
    whose part of the step the buddy has.
    """
    lines: dict[tuple[str, str], dict[str, object]] = {}
    for r in records:
        line = lines.setdefault(
            (r.source, r.attempt),
            {"run": r.run, "step": r.step, "ranks": 0, "world_size": r.world_size, "committed": True, "guest": r.guest}
            | {"age_seconds": round(max(time.time() - r.created, 0.0), 1), "copied": None if copied is None else 0},
        )
        line["ranks"] = int(str(line["ranks"])) + 1
        line["committed"] = bool(line["committed"]) and r.committed > 0
        if copied is not None and copied(r):
            line["copied"] = int(str(line["copied"])) + 1
    return list(lines.values())[:LISTED]
