"""Wrappers that add to any work: columns of the index, and the trainer's own transform.

Purpose: behaviour that every loader can have, written once.
Invariants: what a wrapper adds is a pure function of the sample and its place. The transform gets a generator that is
seeded from the place, so a resumed run and any other world size repeat what it draws.
Failure behaviour: an error of the trainer's own transform is raised as it is, with a note that names the sample; it is
nobody's damage. `UsageError` for a column that is not there, naming those that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError, UsageError
from headrace.dataio.shards.contract import Sample
from headrace.loaders.interfaces import FetchedSample, Needs, ProcessedSample, Processor, SampleLayout, SampleRef

_TRANSFORM = 25  # keeps the generator's seed apart from everything else that is drawn
_OURS = frozenset(["id", "key", "text", "video", "audio", "mel", "clip", "start", "audio_samples", "source", "bucket"])
Tensors = Mapping[str, torch.Tensor]
Transform = Callable[[dict[str, torch.Tensor], torch.Generator], Tensors]


class Around:
    """A work that does what another does, and more."""

    def __init__(self, inner: Processor) -> None:
        self._inner = inner

    @property
    def layout(self) -> SampleLayout:
        return self._inner.layout

    def needs(self, ref: SampleRef) -> Needs:
        return self._inner.needs(ref)

    def cost(self, sample: Sample) -> int:
        return self._inner.cost(sample)

    def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        done = self._inner.process(self._given(loaded))
        return [
            result if isinstance(result, HeadraceError) else self._more(one.ref, result)
            for one, result in zip(loaded, done, strict=True)
        ]

    def close(self) -> None:
        self._inner.close()

    def _given(self, loaded: Sequence[FetchedSample]) -> Sequence[FetchedSample]:
        """What the inner work gets."""
        return loaded

    def _more(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        raise NotImplementedError


class WithColumns(Around):
    """Lists these columns of the index, or promoted fields of the samples' JSON, in every batch; None where a sample
    has none."""

    def __init__(self, inner: Processor, columns: Sequence[str]) -> None:
        from headrace.dataio.shards.index.rows import to_row  # with Arrow, which loaders without columns do without

        super().__init__(inner)
        self._columns, self._row = tuple(columns), to_row

    @property
    def layout(self) -> SampleLayout:
        inner = self._inner.layout
        return replace(inner, numbers={**inner.numbers, **dict.fromkeys(self._columns)})

    def _more(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        row = self._row(finished.sample)
        fields = finished.sample.fields
        more = {name: row[name] if name in row else fields.get(name) for name in self._columns}
        return replace(finished, values={**finished.values, **more})


def check_columns(columns: Sequence[str], known: Sequence[str], url: str) -> tuple[str, ...]:
    """`columns`, if each is there and none hides what a batch holds anyway."""
    for name in columns:
        if name in _OURS:
            raise UsageError(f"columns cannot hold {name!r}: batches have something of that name", hint="leave it out")
        if name == "caption" and name not in known:
            raise UsageError(f"{url} has no column 'caption'", hint='every batch has the captions, as "text"')
        if name not in known:
            raise UsageError(f"{url} has no column {name!r}", hint=f"there are {', '.join(sorted(known))}")
    return tuple(dict.fromkeys(columns))


class Transformed(Around):
    """Calls `transform(tensors, generator)` for every sample, in the thread that decoded it; what it returns is batched."""

    def __init__(self, inner: Processor, transform: Transform) -> None:
        super().__init__(inner)
        self._transform = transform

    def _given(self, loaded: Sequence[FetchedSample]) -> Sequence[FetchedSample]:
        """Without room in the batch: what the transform keeps, or returns turned, is memory of its own."""
        return [replace(one, target=None) for one in loaded]

    def _more(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        generator = torch.Generator().manual_seed(int(ref.key(_TRANSFORM)[0]) >> 1)
        try:
            made: object = self._transform(dict(finished.tensors), generator)
            tensors = dict(made) if isinstance(made, Mapping) else {}
        except Exception as error:
            error.add_note(f"in the loader's transform, for sample {finished.sample.key!r}")
            raise
        self._check(tensors)
        return replace(finished, tensors=tensors)

    def _check(self, tensors: Mapping[str, Any]) -> None:
        missing = [name for name in self.layout.tensors if not isinstance(tensors.get(name), torch.Tensor)]
        if missing or len(tensors) != len(self.layout.tensors):
            names = ", ".join(map(repr, self.layout.tensors))
            raise UsageError(
                f"the loader's transform must return a dict of the tensors {names}, no more and no less",
                hint="what else a batch needs comes with columns=[...]",
            )


def known_columns(fields: Mapping[str, object]) -> list[str]:
    """The names that `columns` may hold: those of the index and the promoted `fields` of a sample."""
    from headrace.dataio.shards.index import rows

    return [*(name for name in rows.SCHEMA.names if name not in ("key", "text")), *fields]


def wrapped(work: Processor, columns: Sequence[str], transform: Transform | None) -> Processor:
    """`work` with what was asked for around it."""
    if transform is not None:
        work = Transformed(work, transform)
    return WithColumns(work, columns) if columns else work
