"""One step as people want to see it: ranks, tensors, bytes, and how its bytes are encoded.

Invariant: nothing is read but documents and manifests.
Failure behaviour: `NotFoundError` for a step that is missing; `CorruptionError` for a manifest that is damaged.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from headrace.checkpoint.format import codec
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.opening import open_step
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.store.base import Store


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One shard of a tensor; `stored`: its share of the stored bytes of its chunks."""

    name: str
    rank: int
    dtype: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    bytes: int
    stored: int
    codecs: tuple[str, ...]


@dataclass(slots=True)
class Shown:
    """`encodings`: by codec, [raw, stored] bytes of every chunk that the step needs, also of earlier steps' packs, of which
    `packs` counts `earlier_packs`. `bases`: the steps that were looked through for what need not be stored again."""

    run: str
    timeline: int
    step: int
    attempt: str
    world_size: int
    bases: tuple[str, ...]
    packs: int
    earlier_packs: int
    bytes_state: int
    bytes_written: int
    bytes_deduplicated: int
    encodings: dict[str, list[int]]
    tensors: list[TensorLine] = field(default_factory=list)


def step_of(text: str) -> int | str:
    """A step as typed: a number, or a word such as latest."""
    return int(text) if text.isdecimal() else text


def look(store: Store, run: str, step: str, *, tensors: bool = False) -> Shown:
    """What the step is made of."""
    base = repository.find(store, run, step_of(step))
    if base is None:
        raise repository.missing(store, run)
    ranks = open_step(store, run, base).manifests
    packs = {pack for m in ranks for pack in m.packs}
    encodings: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for chunk in {chunk.digest: chunk for m in ranks for chunk in m.chunks}.values():
        sizes = encodings[codec.NAMES[chunk.codec]]
        sizes[0], sizes[1] = sizes[0] + chunk.raw, sizes[1] + chunk.stored
    return Shown(
        run,
        base.timeline,
        base.step,
        base.attempt,
        len(ranks),
        tuple(sorted({f"{b.step} of run {b.run}" if b.run else f"{b.step}" for m in ranks for b in m.bases})),
        len(packs),
        sum(pack.attempt != base.attempt for pack in packs),
        sum(m.bytes_state for m in ranks),
        sum(m.bytes_written for m in ranks),
        sum(m.bytes_deduplicated for m in ranks),
        dict(encodings),
        [line for m in ranks for line in _lines(m)] if tensors else [],
    )


def _lines(manifest: Manifest) -> list[TensorLine]:
    found = []
    for t in manifest.tensors:
        chunks = [(manifest.chunks[span.chunk], span) for span in t.spans]
        stored = sum(chunk.stored * span.length // chunk.raw for chunk, span in chunks)
        codecs = tuple(sorted({codec.NAMES[chunk.codec] for chunk, _ in chunks}))
        found.append(TensorLine(t.name, manifest.rank, t.dtype, t.shape, t.local, t.nbytes, stored, codecs))
    return found


def text(shown: Shown) -> str:
    """For people."""
    lines = [
        f"{shown.run}  timeline {shown.timeline}  step {shown.step}  attempt {shown.attempt}  ranks {shown.world_size}",
        f"{format_bytes(shown.bytes_state)} of state, {format_bytes(shown.bytes_written)} written, "
        f"{format_bytes(shown.bytes_deduplicated)} not, because stored before; {counted(shown.packs, 'pack')}"
        + (f", {shown.earlier_packs} of earlier steps" if shown.earlier_packs else ""),
    ]
    if shown.bases:
        lines.append("compared with step " + ", ".join(shown.bases))
    for name, (raw, stored) in sorted(shown.encodings.items()):
        lines.append(f"{name}: {format_bytes(raw)} as {format_bytes(stored)} ({stored / max(raw, 1):.2f})")
    for t in shown.tensors:
        lines.append(
            f"{t.name}  rank {t.rank}  {t.dtype}  {t.local} of {t.shape}  "
            f"{format_bytes(t.bytes)} as {format_bytes(t.stored)}  {', '.join(t.codecs)}"
        )
    return "\n".join(lines)
