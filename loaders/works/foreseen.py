"""What is needed of long files, reckoned once for each place: when it is announced, and not again when it is read.

Purpose: where a window lies in an hour of sound costs as much Python as much of what is done with it.
Invariant: what a place needs is what the work inside says. It is held from `foresee` until it is asked for, so no longer than
the place itself waits to be made. Safe to share between threads.
Failure behaviour: that of the work inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.dataio.core.errors import HeadraceError
from headrace.loaders.interfaces import FetchedSample, ProcessedSample, Processor, SampleRef
from headrace.loaders.partial.needed import Runs
from headrace.loaders.works.added import Around


class Foreseen(Around):
    """A work whose `partial` is asked for once for what `foresee` was asked for; twice is right too, and takes as long again."""

    def __init__(self, inner: Processor) -> None:
        super().__init__(inner)
        self._held = dict[
            int, tuple[SampleRef, Mapping[str, Runs]]
        ]()  # by the very object: as long as it is held, none has its id

    def foresee(self, place: SampleRef) -> Mapping[str, Runs]:
        """`partial`, some time before."""
        found = self._inner.partial(place)
        if found:  # most files are short
            self._held[id(place)] = place, found
        return found

    def partial(self, place: SampleRef) -> Mapping[str, Runs]:
        held = self._held.pop(id(place), None)
        return self._inner.partial(place) if held is None else held[1]

    def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        return self._inner.process(loaded)
