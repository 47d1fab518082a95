"""One place of the order to one finished sample: read, check, process, and stand in for what is damaged.

Purpose: everything that happens to a single sample, as one function that any thread may run.

Invariants: the result is a pure function of (plan, place, stored bytes). A damaged sample is replaced by its neighbours
in the plan's order; nothing else of the batch or of the order changes.
Failure behaviour: only damage (corrupt, unsupported or oversize) is replaced; when `MAX_SUBSTITUTES` neighbours, or all
there are, are damaged as well, `CorruptionError` names the first. An unreachable store, wrong credentials and the like
are nobody's damage and are raised, so that a bad network never changes what is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.core.tracing import span
from headrace.dataio.shards.contract import Sample
from headrace.loaders.batch.memory import MemoryBudget
from headrace.loaders.cancellation import check_cancelled
from headrace.loaders.fetch.sample_reader import SampleReader, ranges
from headrace.loaders.interfaces import (
    DAMAGE,
    FetchedSample,
    FileTarget,
    PixelTarget,
    Plan,
    ProcessedSample,
    Processor,
    SampleRef,
)
from headrace.loaders.partial.needed import Runs, together
from headrace.loaders.quarantine.quarantine import Quarantine
from headrace.loaders.quarantine.records import SkippedSample

MAX_SUBSTITUTES = 16
OnError = Literal["replace", "shorter"]
Rooms = Sequence[PixelTarget | FileTarget | None]
Needs = Mapping[str, Runs]
"""Of a sample's files of which no more than pieces are needed."""
_WHOLE: Needs = {}


class SampleBuilder:
    """Makes samples. `sources` read the plan's datasets. Safe to share between threads.

    `on_bad="replace"` lets neighbours stand in for what is damaged; "shorter" leaves it out, and delivers its refusals
    alone.
    """

    def __init__(
        self,
        plan: Plan,
        work: Processor,
        sources: Sequence[SampleReader],
        quarantine: Quarantine,
        memory: MemoryBudget,
        on_bad: OnError = "replace",
    ) -> None:
        self._plan, self._work, self._sources = plan, work, sources
        self._quarantine, self._memory, self._on_bad = quarantine, memory, on_bad
        self._joined = work.layout.joined

    def make(self, places: Sequence[SampleRef], rooms: Rooms) -> list[ProcessedSample]:
        """The samples of `places`, worked on together where the work can, maybe each in its room. Left out is what has
        no tensors."""
        outcomes = self._try(places, rooms)
        return [
            self._instead(place, room, outcome) if isinstance(outcome, HeadraceError) else outcome
            for place, room, outcome in zip(places, rooms, outcomes, strict=True)
        ]

    def _try(self, places: Sequence[SampleRef], rooms: Rooms) -> list[ProcessedSample | HeadraceError]:
        needs = [
            _WHOLE if isinstance(r, FileTarget) else self._work.partial(p) for p, r in zip(places, rooms, strict=True)
        ]
        with self._memory.admitted(sum(map(self._cost, places, rooms, needs))):
            loaded = self._load_all(places, rooms, needs) if self._joined is None else self._load_joined(places, rooms)
            with span("decode", clips=len(places)):
                whole = [one for one in loaded if isinstance(one, FetchedSample)]
                made = self._work.process(whole)
            if len(whole) == len(places):
                return made
            done = iter(made)
            return [next(done) if isinstance(one, FetchedSample) else one for one in loaded]

    def _cost(self, place: SampleRef, room: PixelTarget | FileTarget | None, partial: Needs) -> int:
        if isinstance(room, FileTarget):
            return len(room.memory)
        sample = place.sample
        read = ranges(sample, self._work.members(sample), partial)
        return sum([length for _, _, length in read]) + self._work.cost(sample)

    def _load_all(
        self, places: Sequence[SampleRef], rooms: Rooms, needs: Sequence[Needs]
    ) -> list[FetchedSample | HeadraceError]:
        """Parts of one sample share its bytes."""
        shared = dict[tuple[int, int], list[Needs]]()
        for place, need in zip(places, needs, strict=True):
            shared.setdefault(_which(place), []).append(need)
        there = dict[tuple[int, int], FetchedSample | HeadraceError]()
        for place, room in zip(places, rooms, strict=True):
            which = _which(place)
            if which not in there:
                there[which] = self._load(place, room, _together(shared[which]))
        found = [there[_which(place)] for place in places]
        return [
            one
            if isinstance(one, HeadraceError) or one.place is place
            else replace(one, place=place, room=_drawn(room))
            for place, room, one in zip(places, rooms, found, strict=True)
        ]

    def _load_joined(self, places: Sequence[SampleRef], rooms: Rooms) -> list[FetchedSample | HeadraceError]:
        """What is delivered as it is, read to where it belongs: all in one go, and one by one from the first on with
        which something is wrong."""
        wanted = dict[int, list[int]]()
        for slot, (place, room) in enumerate(zip(places, rooms, strict=True)):
            if isinstance(room, FileTarget) and not self._quarantine.condemned(place):
                wanted.setdefault(place.source, []).append(slot)
        found: list[FetchedSample | HeadraceError | None] = [None] * len(places)
        for source, slots in wanted.items():
            stretches = [room for slot in slots if isinstance(room := rooms[slot], FileTarget)]
            whole = self._sources[source].fetch_first(stretches)
            for slot, stretch in zip(slots[:whole], stretches, strict=False):
                found[slot] = FetchedSample(places[slot], {}, None, stretch.files)
        return [one or self._load(places[slot], None, _WHOLE) for slot, one in enumerate(found)]

    def _load(
        self, place: SampleRef, room: PixelTarget | FileTarget | None, partial: Needs
    ) -> FetchedSample | HeadraceError:
        """Read the bytes and check them; of files that are read in part, that is done when they are looked at."""
        check_cancelled()  # a store may take seconds for each
        known = self._quarantine.condemned(place)
        if known:
            return known
        try:
            source, exts = self._sources[place.source], self._work.members(place.sample)
            return FetchedSample(place, source.fetch(place.sample, exts, partial), _drawn(room))
        except CorruptionError as error:
            self._quarantine.condemn(place, error)
            return error

    def _instead(
        self, place: SampleRef, room: PixelTarget | FileTarget | None, error: HeadraceError
    ) -> ProcessedSample:
        if self._on_bad == "replace" or not isinstance(error, DAMAGE):
            return self._substitute(place, room, error)
        return ProcessedSample(place.sample, {}, refusals=(self._refusal(place, error),))

    def _substitute(
        self, place: SampleRef, room: PixelTarget | FileTarget | None, error: HeadraceError
    ) -> ProcessedSample:
        """The first neighbour that is whole."""
        refusals: list[SkippedSample] = []
        refused, first = place, error
        for attempt in range(MAX_SUBSTITUTES):
            if not isinstance(error, DAMAGE):
                raise error
            refusals.append(self._refusal(refused, error))
            other = self._plan.substitute(place, attempt)
            if other is None:
                break
            refused = other
            outcome = self._try([refused], [self._room_for(refused.sample, room)])[0]
            if not isinstance(outcome, HeadraceError):
                return replace(outcome, refusals=tuple(refusals))
            error = outcome
        raise CorruptionError(
            f"sample {place.sample.key!r} is damaged ({first.message}), and so is every sample that could stand in for it",
            hint="check the dataset with `headrace verify`",
        ) from first

    def _room_for(self, sample: Sample, room: PixelTarget | FileTarget | None) -> PixelTarget | FileTarget | None:
        """The room of one sample for another one; None where its files do not fill it."""
        if self._joined is None or not isinstance(room, FileTarget):
            return room
        files = self._joined(sample)
        return FileTarget(files, room.memory) if files.size == len(room.memory) else None

    def _refusal(self, place: SampleRef, error: HeadraceError) -> SkippedSample:
        sample = place.sample
        for_good = self._quarantine.condemned(place) is not None
        url = self._plan.datasets[place.source].url
        offset = _offset(sample, self._work.members(sample))
        return SkippedSample(
            sample.id, sample.key, sample.shard, offset, error.code, str(error), for_good, url, place.source
        )


def _which(place: SampleRef) -> tuple[int, int]:
    """Its sample."""
    return place.source, place.sample.id


def _together(needs: Sequence[Needs]) -> Needs:
    """What several places of one sample need."""
    first, *others = needs
    return {ext: together([runs, *(one.get(ext, ()) for one in others)]) for ext, runs in first.items()}


def _drawn(room: PixelTarget | FileTarget | None) -> PixelTarget | None:
    """The target that a processor can draw in."""
    return None if isinstance(room, FileTarget) else room


def _offset(sample: Sample, exts: Sequence[str]) -> int:
    """Where the first of these members begins in its shard."""
    return next((member.offset for ext in exts for member in sample.members if member.ext == ext), 0)
