"""Works that look at where a sample comes from: its source's name, its bucket's shape.

Purpose: what mixtures and buckets add to any work, by wrapping it.
Invariants: those of `headrace.loaders.interfaces`.
Failure behaviour: that of the works inside.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.shards.contract import Sample
from headrace.loaders.interfaces import FetchedSample, Needs, ProcessedSample, Processor, SampleLayout, SampleRef
from headrace.loaders.works.added import Around


class Named(Around):
    """Lists the name of each sample's source as "source"."""

    def __init__(self, inner: Processor, names: Sequence[str]) -> None:
        super().__init__(inner)
        self._names = tuple(names)

    @property
    def layout(self) -> SampleLayout:
        inner = self._inner.layout
        return replace(inner, numbers={**inner.numbers, "source": None})

    def _more(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        return replace(finished, values={**finished.values, "source": self._names[ref.source]})


class ByStream:
    """One work for each of the plan's streams. They share what `close` closes: the first one's is called."""

    def __init__(self, works: Sequence[Processor]) -> None:
        self._works = tuple(works)

    @property
    def layout(self) -> SampleLayout:
        return self._works[0].layout

    def needs(self, ref: SampleRef) -> Needs:
        return self._works[ref.stream].needs(ref)

    def cost(self, sample: Sample) -> int:
        return max(work.cost(sample) for work in self._works)

    def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        done = dict[int, ProcessedSample | HeadraceError]()
        for stream in sorted({one.ref.stream for one in loaded}):
            slots = [slot for slot, one in enumerate(loaded) if one.ref.stream == stream]
            done.update(zip(slots, self._works[stream].process([loaded[slot] for slot in slots]), strict=True))
        return [done[slot] for slot in range(len(loaded))]

    def close(self) -> None:
        self._works[0].close()


def by_stream(works: Sequence[Processor]) -> Processor:
    """One work, or one for each stream."""
    return works[0] if len(works) == 1 else ByStream(works)


def sourced(work: Processor, names: Sequence[str]) -> Processor:
    """`work` with the names of a mixture's sources, if there are any."""
    return Named(work, names) if names else work
