"""Reports about a repository: `check` reads everything, `describe` shows one step.

Invariant: if the report lists no problem of a step, every byte of that step was read and compared with its digest. With
`data=False`, `check` reads only documents, manifests and pack tables. Each problem names the steps and tensors that it
affects. A check writes what `survey` writes, and nothing else. A step that a collection removes during the check does
not count as damaged.
Failure behaviour: `check` puts damage into the report. `describe` raises `NotFoundError` or `CorruptionError`.
Transient errors and refused access are raised.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.checkpoint.format import artifacts, codec, names, pack
from headrace.checkpoint.format.manifest import Chunk, Manifest
from headrace.checkpoint.format.metadata import Metadata, given
from headrace.checkpoint.repository import descriptions, fetch
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import Step, open_step
from headrace.checkpoint.repository.inventory import many
from headrace.checkpoint.repository.survey import Problem, Report, survey
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import (
    CorruptionError,
    NotFoundError,
    UnsupportedError,
)
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.store.base import Store

_MISSING = "it is missing"


@dataclass(slots=True)
class _Needs:
    """The chunks that steps need, by pack key and offset, and the manifests that need each pack."""

    chunks: dict[str, dict[int, Chunk]] = field(default_factory=lambda: defaultdict(dict))
    users: dict[str, list[tuple[Step, Manifest]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, step: Step) -> None:
        for manifest in step.manifests:
            for chunk in manifest.chunks:
                self.chunks[manifest.packs[chunk.pack].key][chunk.offset] = chunk
            for name in manifest.packs:
                self.users[name.key].append((step, manifest))


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """The progress of a check: bytes of chunks, read and in total, and the number of steps that need them."""

    bytes: int
    bytes_total: int
    steps: int


def check(
    store: Store,
    run: str | None = None,
    *,
    data: bool = True,
    clock: Clock = SYSTEM_CLOCK,
    progress: Callable[[CheckProgress], None] | None = None,
) -> Report:
    """Check the repository, or one run.

    Args:
        store: The repository.
        run: A run, or None for all of them.
        data: Whether the chunks themselves are read.
        clock: The time by which unfinished attempts are judged.
        progress: Called after each chunk, by several threads but one at a time. Default: None.
    """
    report = survey(store, run, clock)
    steps = list(_open_steps(store, report))
    needs = _Needs()
    for step in steps:
        needs.add(step)
    existing = _check_tables(store, needs, report)
    if data:
        _check_data(store, existing, needs, report, progress)
    _check_descriptions(store, steps, report)
    if report.problems:
        report.problems = _of_remaining_steps(store, steps, report.problems)
    if run is None and not report.problems:
        stored = (info.key for info in store.list(names.PACKS))
        report.unreferenced = [key for key in stored if key not in needs.chunks]
    return report


def _open_steps(store: Store, report: Report) -> Iterator[Step]:
    """The listed steps with their manifests. A step whose manifests are damaged moves to the problems."""
    lines, report.steps = report.steps, []
    for line in lines:
        try:
            yield open_step(store, line.run, line.base)
        except (CorruptionError, UnsupportedError, NotFoundError) as error:
            if not repository.has_tombstone(store, line.run, line.timeline, line.step):
                step_label = f"step {line.step} of run {line.run}, timeline {line.timeline}"
                report.problems.append(
                    Problem(names.step(line.run, line.timeline, line.step), error.message, (step_label,))
                )
        else:
            report.steps.append(line)


def _of_remaining_steps(store: Store, steps: list[Step], problems: list[Problem]) -> list[Problem]:
    """Drop problems that affect only steps that a collection removed during the check."""
    removed = {_label(step) for step in steps if repository.is_removed(store, step.run, step.base)}
    remaining = []
    for problem in problems:
        hits = tuple(hit for hit in problem.hits if hit.partition(": ")[0] not in removed)
        if hits or not problem.hits:
            remaining.append(Problem(problem.object, problem.what, hits))
    return remaining


def _label(step: Step) -> str:
    return f"{step.run}/{step.base.timeline}/{step.base.step}"


def _check_tables(store: Store, needs: _Needs, report: Report) -> list[str]:
    """Compare each pack's own table with the manifests and report differences. Returns the packs that exist."""
    keys = sorted(needs.chunks)
    attempts = sorted({at[0] for at in map(names.parse_pack_key, keys) if at is not None})
    sizes: dict[str, int] = {}
    for pack_sizes in many(lambda each: [(info.key, info.size) for info in store.list(names.packs(each))], attempts):
        sizes.update(pack_sizes)
    existing = []
    for key, table in many(lambda key: (key, _read_table(store, key, sizes.get(key))), keys):
        report.packs += 1
        needed = needs.chunks[key].values()
        if isinstance(table, str):
            report.problems.append(Problem(key, table, _hits(needs, key, needed)))
        else:
            for chunk in needed:
                _compare(key, chunk, table, needs, report)
        if table != _MISSING:
            existing.append(key)
    return existing


def _read_table(store: Store, key: str, size: int | None) -> Mapping[int, pack.Entry] | str:
    """The table of a pack by offset, or the reason why it cannot be read."""
    try:
        if size is None and not store.exists(key):
            return _MISSING
        return {entry.offset: entry for entry in pack.read_table(store, key, size)}
    except (CorruptionError, UnsupportedError) as error:
        return error.message


def _compare(key: str, chunk: Chunk, table: Mapping[int, pack.Entry], needs: _Needs, report: Report) -> None:
    entry = table.get(chunk.offset)
    if entry is None or (entry.digest, entry.stored, entry.raw) != (chunk.digest, chunk.stored, chunk.raw):
        difference = f"its table lacks the chunk at offset {chunk.offset} that a manifest names"
        report.problems.append(Problem(key, difference, _hits(needs, key, [chunk])))


def _check_data(
    store: Store,
    packs: Sequence[str],
    needs: _Needs,
    report: Report,
    progress: Callable[[CheckProgress], None] | None,
) -> None:
    lock = threading.Lock()
    total = sum(chunk.stored for key in packs for chunk in needs.chunks[key].values())
    bad: dict[str, list[Chunk]] = defaultdict(list)

    def use(key: str, chunk: Chunk, payload: memoryview | None) -> None:
        with lock:
            report.chunks += 1
            report.bytes_read += chunk.stored
            if payload is None:
                bad[key].append(chunk)
            if progress is not None:
                progress(CheckProgress(report.bytes_read, total, len(report.steps)))

    fetch.fetch(store, (b for key in packs for b in fetch.batches(key, needs.chunks[key].values())), use)
    for key, chunks in sorted(bad.items()):
        for chunk in sorted(chunks, key=lambda c: c.offset):
            damage = f"the {chunk.stored} bytes at offset {chunk.offset} differ from the bytes that were written"
            report.problems.append(Problem(key, damage, _hits(needs, key, [chunk])))


def _check_descriptions(store: Store, steps: Iterable[Step], report: Report) -> None:
    """Read each description that a step names, once, and report those that are missing or damaged."""
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for step in steps:
        if step.manifests[0].description:
            users[step.run, step.manifests[0].description].append(_label(step))

    def flaw(run: str, digest: str) -> str:
        try:
            return "" if descriptions.read(store, run, digest) is not None else _MISSING
        except CorruptionError as error:
            return error.message

    for at, problem in many(lambda at: (at, flaw(*at)), sorted(users)):
        if problem:
            report.problems.append(Problem(names.description(*at), problem, tuple(users[at])))


def _hits(needs: _Needs, key: str, chunks: Iterable[Chunk]) -> tuple[str, ...]:
    """`run/timeline/step: tensor` for each tensor that needs any of these chunks of a pack."""
    digests = {chunk.digest for chunk in chunks}
    hits = set()
    for step, manifest in needs.users[key]:
        numbers = {i for i, chunk in enumerate(manifest.chunks) if chunk.digest in digests}
        for tensor in manifest.tensors:
            if any(span.chunk in numbers for span in tensor.spans):
                hits.add(f"{_label(step)}: {tensor.name}")
    return tuple(sorted(hits))


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One shard of a tensor. `stored` is its share of the stored bytes of its chunks."""

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
    """One step in detail.

    `bases`: the steps whose chunks the saver compared with. `packs`: all packs that the step needs; `earlier_packs` of
    them belong to earlier steps. `encodings`: by codec, [raw, stored] bytes of every chunk that the step needs, in any
    pack. `description`: its sections, or None. `artifacts`: name, rank and bytes of each. `loaders`: the positions of
    loaders in the state of rank 0, by path.
    """

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
    metadata: Metadata = field(default_factory=dict)
    description: dict[str, Any] | None = None
    artifacts: list[tuple[str, int, int]] = field(default_factory=list)
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)


def step_of(text: str) -> int | str:
    """Convert a step from the command line: digits to a number; other words, such as latest, stay as they are."""
    return int(text) if text.isdecimal() else text


def describe(
    store: Store,
    run: str,
    step: str,
    *,
    tensors: bool = False,
    positions: Callable[[bytes], dict[str, dict[str, Any]]] = lambda _: {},
) -> Shown:
    """Describe one step: its sizes, packs and codecs; with `tensors` also each tensor shard.

    `positions` finds the positions of loaders in the encoded tree of rank 0.
    """
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
        given(ranks[0].metadata),
        descriptions.read(store, run, ranks[0].description),
        sorted((name, m.rank, tensor.nbytes) for m in ranks for name, tensor in artifacts.of_manifest(m)),
        positions(ranks[0].tree),
    )


def _lines(manifest: Manifest) -> list[TensorLine]:
    tensor_lines = []
    for t in manifest.tensors:
        chunks = [(manifest.chunks[span.chunk], span) for span in t.spans]
        stored = sum(chunk.stored * span.length // chunk.raw for chunk, span in chunks)
        codecs = tuple(sorted({codec.NAMES[chunk.codec] for chunk, _ in chunks}))
        tensor_lines.append(TensorLine(t.name, manifest.rank, t.dtype, t.shape, t.local, t.nbytes, stored, codecs))
    return tensor_lines


def lines(shown: Shown) -> list[str]:
    """Describe the step in lines of text for the command line. A line may contain any character of a tensor's name."""
    text = [
        f"{shown.run}  timeline {shown.timeline}  step {shown.step}  attempt {shown.attempt}  ranks {shown.world_size}",
        f"{format_bytes(shown.bytes_state)} of state, {format_bytes(shown.bytes_written)} written, "
        f"{format_bytes(shown.bytes_deduplicated)} deduplicated; {counted(shown.packs, 'pack')}"
        + (f", {shown.earlier_packs} of them from earlier steps" if shown.earlier_packs else ""),
    ]
    if shown.bases:
        text.append("compared with step " + ", ".join(shown.bases))
    for name, (raw, stored) in sorted(shown.encodings.items()):
        text.append(f"{name}: {format_bytes(raw)} as {format_bytes(stored)} ({stored / max(raw, 1):.2f})")
    for t in shown.tensors:
        text.append(
            f"{t.name}  rank {t.rank}  {t.dtype}  {t.local} of {t.shape}  "
            f"{format_bytes(t.bytes)} as {format_bytes(t.stored)}  {', '.join(t.codecs)}"
        )
    return text
