"""From a staged arena and its put plan to a committed step; in a thread of the trainer or in a process of the daemon.

Order, each step durable before the next: lease → (base read) → packs → rank manifest → fate → COMMIT → lease deleted.
Invariant: the arena is only read, and not at all after `Released`. Two carriers of one plan may run at once: their packs
have names of their own, and of their manifests the first one stands. Whatever happens, the step is afterwards absent, or
complete, or committed; the previous steps are untouched.
Failure behaviour: errors of `dataio.core.errors`; what was uploaded before one is garbage that no step refers to. As a
program (`python -m checkpoint.carry --arena-fd N --plan-fd M`) it reports events as lines of JSON on standard output and
ends with the error's exit code; it goes on when nobody reads them any more.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from checkpoint import codec, commit, dedup, layout, names, pack
from checkpoint import manifest as manifests
from checkpoint import plan as plans
from checkpoint.ahead import in_order
from checkpoint.chunk import digest
from checkpoint.commit import Attempt
from checkpoint.documents import Commit
from checkpoint.events import Done, Event, Progress, Released, failed, to_json
from checkpoint.lease import LeaseKeeper
from checkpoint.manifest import Chunk, PackName
from checkpoint.plan import PutPlan
from dataio.core.clock import SYSTEM_CLOCK, Clock
from dataio.core.crashpoints import declare
from dataio.core.errors import MillraceError, UsageError
from dataio.core.limits import MIB
from dataio.store.contract import Store
from dataio.store.open import open_location

_THREADS = 2
_AHEAD = 8
"""Chunks hashed ahead of the upload."""

_started = declare("ckpt.carry-started", "nothing of the attempt is stored")
_leased = declare("ckpt.lease-written", "only the lease is there: invisible")
_in_pack = declare("ckpt.in-pack", "a pack is half sent: invisible, and no such object")
_first_pack = declare("ckpt.first-pack", "one pack is there: invisible, garbage once the lease is over")
_packs_written = declare("ckpt.packs-written", "all packs are there, no manifest: invisible")
_manifest_written = declare("ckpt.manifest-written", "packs and this rank's manifest are there: invisible")
_lease_deleted = declare("ckpt.lease-deleted", "committed, nothing left to do")


@dataclass(slots=True)
class Tables:
    """The manifest's tables while they grow, and what became of the bytes."""

    packs: dict[PackName, int] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    number: dict[bytes, int] = field(default_factory=dict)
    written: int = 0
    deduplicated: int = 0

    def add(self, name: PackName, entry: pack.Entry | Chunk) -> None:
        self.number[entry.digest] = len(self.chunks)
        at = self.packs.setdefault(name, len(self.packs))
        self.chunks.append(Chunk(entry.digest, at, entry.offset, entry.stored, entry.raw, entry.codec))


def carry(
    arena: memoryview,
    plan: bytes,
    emit: Callable[[Event], None],
    *,
    store: Store | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, object]:
    """Commit the plan's step and return what happened; `store` when the caller has it open already."""
    decoded = plans.decode(plan, len(arena))
    if store is not None:
        return _carry(arena, decoded, emit, store, clock)
    with open_location(decoded.location.to_location()) as opened:
        return _carry(arena, decoded, emit, opened, clock)


def _carry(
    arena: memoryview, plan: PutPlan, emit: Callable[[Event], None], store: Store, clock: Clock
) -> dict[str, object]:
    began = clock.monotonic()
    attempt = Attempt(plan.run, plan.timeline, plan.step, plan.attempt, plan.world_size)
    _started()
    _refuse_early(store, attempt)
    lease = LeaseKeeper(store, plan.attempt, plan.run, plan.timeline, plan.step, plan.bases, plan.lease_seconds, clock)
    with lease:
        _leased()
        tables, digests, known = _upload(arena, plan, emit, store)
        emit(Released())
        _packs_written()
        manifest = _manifest(plan, tables, digests, known, clock)
        store.put_if_absent(attempt.manifest_key(plan.rank), manifests.encode(manifest))  # another carrier's will do
        _manifest_written()
        found = commit.finish(store, attempt, lease, timeout=plan.commit_timeout, clock=clock)
        lease.release()
        _lease_deleted()
    return result_of(store, attempt, plan.rank, found) | {"seconds": clock.monotonic() - began}


def _refuse_early(store: Store, attempt: Attempt) -> None:
    """Stop before anything is uploaded when the attempt cannot become the step any more."""
    action = commit.decide(attempt, commit.look(store, attempt, lease_alive=True))
    if isinstance(action, commit.Stop):
        raise action.error


def result_of(store: Store, attempt: Attempt, rank: int, found: Commit) -> dict[str, object]:
    """What is reported of a committed save: from the rank's manifest that stands, whoever wrote it."""
    key = attempt.manifest_key(rank)
    manifest = manifests.decode(store.get(key, max_bytes=manifests.MAX_BYTES), key)
    return {
        "run": attempt.run,
        "timeline": attempt.timeline,
        "step": attempt.step,
        "attempt": attempt.id,
        "rank": rank,
        "bytes_state": manifest.bytes_state,
        "bytes_written": manifest.bytes_written,
        "bytes_deduplicated": manifest.bytes_deduplicated,
        "committed": found.committed,
        "seconds": max(found.committed - manifest.created, 0.0),
    }


def _upload(
    arena: memoryview, plan: PutPlan, emit: Callable[[Event], None], store: Store
) -> tuple[Tables, list[bytes], dedup.Known]:
    """Hash every piece of the arena, store those that are new; the digests are by piece."""
    specs = [tensor.spec() for tensor in plan.tensors]
    pieces, _ = layout.cut_all(specs, layout.lay_out(specs))
    known = dedup.load(store, plan.run, plan.bases)
    tables, digests, carrier = Tables(), [], os.urandom(4).hex()
    total = sum(piece.length for piece in pieces)

    def new_chunks() -> Iterator[pack.NewChunk]:
        done = said = 0
        for chunk in _hashed(arena, pieces, known, plan.compression):
            digests.append(chunk.digest)
            yield from _if_new(chunk, known, tables)
            done += chunk.raw
            if done == total or done - said >= max(total // 100, 4 * MIB):
                said = done
                emit(Progress(done, total))

    def packed(number: int, entry: pack.Entry) -> None:
        tables.add(PackName(plan.attempt, names.pack_name(plan.rank, carrier, number)), entry)
        tables.written += entry.stored
        _in_pack()

    def key_of(number: int) -> str:
        return names.pack(plan.attempt, names.pack_name(plan.rank, carrier, number))

    for _ in pack.write_all(store, key_of, new_chunks(), packed):
        _first_pack()
    return tables, digests, known


def _if_new(chunk: pack.NewChunk, known: dedup.Known, tables: Tables) -> Iterator[pack.NewChunk]:
    if chunk.digest in tables.number:
        tables.deduplicated += chunk.raw
    elif (stored := known.chunks.get(chunk.digest)) is not None:
        tables.add(stored.pack, stored.chunk)
        tables.deduplicated += chunk.raw
    else:
        yield chunk


def _hashed(
    arena: memoryview, pieces: Sequence[layout.Piece], known: dedup.Known, compression: str
) -> Iterator[pack.NewChunk]:
    """The pieces as chunks, in order, hashed (and compressed when they are new) by threads a few chunks ahead."""

    def work(piece: layout.Piece) -> pack.NewChunk:
        payload = arena[piece.at : piece.at + piece.length]
        name = digest(payload)
        stored, kind = (payload, manifests.RAW) if name in known.chunks else codec.pack(payload, compression)
        return pack.NewChunk(name, stored, piece.length, kind)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="millrace-hash") as pool:
        yield from in_order(pool, work, pieces, _AHEAD)


def _manifest(
    plan: PutPlan, tables: Tables, digests: Sequence[bytes], known: dedup.Known, clock: Clock
) -> manifests.Manifest:
    specs = [tensor.spec() for tensor in plan.tensors]
    _, spans = layout.cut_all(specs, layout.lay_out(specs))
    tensors = tuple(
        manifests.Tensor(
            spec.name,
            spec.dtype,
            spec.box.shape,
            spec.box.offset,
            spec.box.local,
            spec.replicated,
            tuple(manifests.Span(tables.number[digests[s.piece]], s.start, s.length) for s in own),
        )
        for spec, own in zip(specs, spans, strict=True)
    )
    return manifests.Manifest(
        run=plan.run,
        timeline=plan.timeline,
        step=plan.step,
        attempt=plan.attempt,
        rank=plan.rank,
        world_size=plan.world_size,
        created=clock.time(),
        bases=tuple(known.bases),
        packs=tuple(tables.packs),
        chunks=tuple(tables.chunks),
        tensors=tensors,
        tree=plan.tree,
        replicas=plan.replicas,
        bytes_state=plan.bytes_state,
        bytes_written=tables.written,
        bytes_deduplicated=tables.deduplicated,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The program: see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint.carry", description="Commit one staged checkpoint.")
    parser.add_argument("--arena-fd", type=int, required=True, help="descriptor of the staging arena")
    parser.add_argument("--plan-fd", type=int, required=True, help="descriptor that the put plan is read from")
    options = parser.parse_args(argv)
    try:
        result = carry(_mapped(options.arena_fd), _read_plan(options.plan_fd), _print)
    except MillraceError as error:
        _print(failed(error))
        return error.exit_code
    _print(Done(result))
    return 0


def _mapped(fd: int) -> memoryview:
    """The arena, read-only, for as long as the process lives."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))


def _read_plan(fd: int) -> bytes:
    with contextlib.suppress(OSError):  # a pipe has no position
        os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        data = file.read(plans.MAX_BYTES + 1)
    if len(data) > plans.MAX_BYTES:
        raise UsageError(f"the put plan is larger than {plans.MAX_BYTES} bytes")
    return data


def _print(event: Event) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(to_json(event) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
