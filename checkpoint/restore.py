"""Tensor bytes of a committed step, into whatever memory the caller has for them.

Invariant: only bytes whose digest is right are copied into a caller's memory. A lease names the step while it is read, and
the step is looked at again after the lease is written, so that no collector takes it away meanwhile.
Failure behaviour: `CorruptionError` naming step, tensor, pack and offset; memory of tensors that were complete before it
has then been changed, memory of the damaged one holds a mixture: the caller must restore another step or stop.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from checkpoint import commit, fetch, names, repository, ulid
from checkpoint.documents import Base
from checkpoint.lease import LeaseKeeper
from checkpoint.manifest import Chunk, Manifest, Tensor
from checkpoint.repository import Step
from dataio.core.errors import AccessDeniedError, CorruptionError, NotFoundError
from dataio.core.log import get_logger, warn_once
from dataio.store.contract import Store

_log = get_logger(__name__)


class Sink(Protocol):
    """Memory for one tensor."""

    def open(self) -> memoryview:
        """Writable memory of exactly the tensor's bytes, row-major; called once, before the first byte arrives."""
        ...

    def close(self) -> None:
        """All bytes are in."""
        ...


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor of one of the step's manifests, and where it goes."""

    manifest: Manifest
    tensor: Tensor
    sink: Sink


@dataclass(slots=True)
class _Use:
    want: int
    at: int
    start: int
    length: int


@dataclass(slots=True)
class _Wanted:
    """A chunk in its pack with all its uses: the form in which `fetch` takes it."""

    chunk: Chunk
    uses: list[_Use] = field(default_factory=list)

    @property
    def digest(self) -> bytes:
        return self.chunk.digest

    @property
    def offset(self) -> int:
        return self.chunk.offset

    @property
    def stored(self) -> int:
        return self.chunk.stored

    @property
    def raw(self) -> int:
        return self.chunk.raw

    @property
    def codec(self) -> int:
        return self.chunk.codec


def tensors_of(step: Step, rank: int) -> dict[str, tuple[Manifest, Tensor]]:
    """By name, every tensor that `rank` sees: its own, and the replicated ones of all.

    A rank that the step was not saved with sees the rank-local tensors of rank 0.
    """
    own = step.manifests[rank if rank < len(step.manifests) else 0]
    found = {t.name: (m, t) for m in step.manifests for t in m.tensors if t.replicated}
    return found | {t.name: (own, t) for t in own.tensors if not t.replicated}


@contextlib.contextmanager
def reading(store: Store, run: str, base: Base) -> Iterator[Step]:
    """The step, opened, with a lease held while it is read."""
    lease = LeaseKeeper(store, ulid.new(), run, base.timeline, base.step, [base])
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lease)
            stack.callback(lease.release)
        except AccessDeniedError:
            warn_once(_log, f"{store.location.url} may not be written to: reading without a lease")
        _still_there(store, run, base)
        yield repository.open_step(store, run, base)


def _still_there(store: Store, run: str, base: Base) -> None:
    found = commit.find_commit(store, names.commit(run, base.timeline, base.step))
    gone = found is None or found.tombstone or (run, base.timeline, base.step) in repository.condemned(store)
    if gone:
        raise NotFoundError(f"step {base.step} of run {run} is being removed by retention", hint="restore a later step")


def read(store: Store, step: Step, wants: Sequence[Want]) -> None:
    """Fill the sinks of all `wants`."""
    by_pack: dict[str, dict[int, _Wanted]] = defaultdict(dict)
    left = [len(want.tensor.spans) for want in wants]
    for number, want in enumerate(wants):
        at = 0
        for span in want.tensor.spans:
            chunk = want.manifest.chunks[span.chunk]
            key = want.manifest.packs[chunk.pack].key
            wanted = by_pack[key].setdefault(chunk.offset, _Wanted(chunk))
            wanted.uses.append(_Use(number, at, span.start, span.length))
            at += span.length
    filling = _Filling(step, wants, left)
    work = (batch for key in sorted(by_pack) for batch in fetch.batches(key, by_pack[key].values()))
    fetch.fetch(store, work, filling.use)


class _Filling:
    """Copies chunks into the sinks; opens a sink at its first byte and closes it after its last."""

    def __init__(self, step: Step, wants: Sequence[Want], left: list[int]) -> None:
        self._step, self._wants, self._left = step, wants, left
        self._open: dict[int, memoryview] = {}
        self._lock = threading.Lock()

    def use(self, pack: str, wanted: _Wanted, payload: memoryview | None) -> None:
        if payload is None:
            raise self._damaged(pack, wanted)
        for use in wanted.uses:
            target = self._target(use.want)[use.at : use.at + use.length]
            np.copyto(
                np.frombuffer(target, np.uint8), np.frombuffer(payload[use.start : use.start + use.length], np.uint8)
            )
            self._done(use.want)

    def _target(self, want: int) -> memoryview:
        with self._lock:
            if want not in self._open:
                self._open[want] = self._wants[want].sink.open()
            return self._open[want]

    def _done(self, want: int) -> None:
        with self._lock:
            self._left[want] -= 1
            if self._left[want]:
                return
            del self._open[want]
        self._wants[want].sink.close()

    def _damaged(self, pack: str, wanted: _Wanted) -> CorruptionError:
        base, names_hit = self._step.base, sorted({self._wants[use.want].tensor.name for use in wanted.uses})
        more = f" and {len(names_hit) - 1} more" if len(names_hit) > 1 else ""
        return CorruptionError(
            f"step {base.step} of run {self._step.run} is damaged: tensor {names_hit[0]!r:.200}{more}, "
            f"{wanted.stored} bytes at offset {wanted.offset} of {pack}",
            hint="restore an earlier step; `millrace ckpt check` lists what else is damaged",
        )
