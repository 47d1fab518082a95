"""One place of the order to one finished sample: read, check, work, and stand in for what is damaged.

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
from headrace.dataio.core.trace import span
from headrace.dataio.shards.contract import Sample
from headrace.loaders.batch.memory import Memory
from headrace.loaders.cancellation import check
from headrace.loaders.fetch.sample_reader import Source, ranges
from headrace.loaders.interfaces import DAMAGE, Finished, Loaded, Place, Plan, Room, Stretch, Work
from headrace.loaders.partial.needed import Runs, together
from headrace.loaders.quarantine.quarantine import Quarantine
from headrace.loaders.quarantine.records import Refusal

MAX_SUBSTITUTES = 16
OnBad = Literal["replace", "shorter"]
Rooms = Sequence[Room | Stretch | None]
Needs = Mapping[str, Runs]
"""Of a sample's files of which no more than pieces are needed."""
_WHOLE: Needs = {}


class Maker:
    """Makes samples. `sources` read the plan's datasets. Safe to share between threads.

    `on_bad="replace"` lets neighbours stand in for what is damaged; "shorter" leaves it out, and delivers its refusals
    alone.
    """

    def __init__(
        self,
        plan: Plan,
        work: Work,
        sources: Sequence[Source],
        quarantine: Quarantine,
        memory: Memory,
        on_bad: OnBad = "replace",
    ) -> None:
        self._plan, self._work, self._sources = plan, work, sources
        self._quarantine, self._memory, self._on_bad = quarantine, memory, on_bad
        self._joined = work.layout.joined

    def make(self, places: Sequence[Place], rooms: Rooms) -> list[Finished]:
        """The samples of `places`, worked on together where the work can, maybe each in its room. Left out is what has
        no tensors."""
        outcomes = self._try(places, rooms)
        return [
            self._instead(place, room, outcome) if isinstance(outcome, HeadraceError) else outcome
            for place, room, outcome in zip(places, rooms, outcomes, strict=True)
        ]

    def _try(self, places: Sequence[Place], rooms: Rooms) -> list[Finished | HeadraceError]:
        needs = [
            _WHOLE if isinstance(r, Stretch) else self._work.partial(p) for p, r in zip(places, rooms, strict=True)
        ]
        with self._memory.admitted(sum(map(self._cost, places, rooms, needs))):
            loaded = self._load_all(places, rooms, needs) if self._joined is None else self._load_joined(places, rooms)
            with span("decode", clips=len(places)):
                whole = [one for one in loaded if isinstance(one, Loaded)]
                made = self._work.do(whole)
            if len(whole) == len(places):
                return made
            done = iter(made)
            return [next(done) if isinstance(one, Loaded) else one for one in loaded]

    def _cost(self, place: Place, room: Room | Stretch | None, partial: Needs) -> int:
        if isinstance(room, Stretch):
            return len(room.memory)
        sample = place.sample
        read = ranges(sample, self._work.members(sample), partial)
        return sum([length for _, _, length in read]) + self._work.cost(sample)

    def _load_all(self, places: Sequence[Place], rooms: Rooms, needs: Sequence[Needs]) -> list[Loaded | HeadraceError]:
        """Parts of one sample share its bytes."""
        shared = dict[tuple[int, int], list[Needs]]()
        for place, need in zip(places, needs, strict=True):
            shared.setdefault(_which(place), []).append(need)
        there = dict[tuple[int, int], Loaded | HeadraceError]()
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

    def _load_joined(self, places: Sequence[Place], rooms: Rooms) -> list[Loaded | HeadraceError]:
        """What is delivered as it is, read to where it belongs: all in one go, and one by one from the first on with
        which something is wrong."""
        wanted = dict[int, list[int]]()
        for slot, (place, room) in enumerate(zip(places, rooms, strict=True)):
            if isinstance(room, Stretch) and not self._quarantine.condemned(place):
                wanted.setdefault(place.source, []).append(slot)
        found: list[Loaded | HeadraceError | None] = [None] * len(places)
        for source, slots in wanted.items():
            stretches = [room for slot in slots if isinstance(room := rooms[slot], Stretch)]
            whole = self._sources[source].fetch_first(stretches)
            for slot, stretch in zip(slots[:whole], stretches, strict=False):
                found[slot] = Loaded(places[slot], {}, None, stretch.files)
        return [one or self._load(places[slot], None, _WHOLE) for slot, one in enumerate(found)]

    def _load(self, place: Place, room: Room | Stretch | None, partial: Needs) -> Loaded | HeadraceError:
        """Read the bytes and check them; of files that are read in part, that is done when they are looked at."""
        check()  # a store may take seconds for each
        known = self._quarantine.condemned(place)
        if known:
            return known
        try:
            source, exts = self._sources[place.source], self._work.members(place.sample)
            return Loaded(place, source.fetch(place.sample, exts, partial), _drawn(room))
        except CorruptionError as error:
            self._quarantine.condemn(place, error)
            return error

    def _instead(self, place: Place, room: Room | Stretch | None, error: HeadraceError) -> Finished:
        if self._on_bad == "replace" or not isinstance(error, DAMAGE):
            return self._substitute(place, room, error)
        return Finished(place.sample, {}, refusals=(self._refusal(place, error),))

    def _substitute(self, place: Place, room: Room | Stretch | None, error: HeadraceError) -> Finished:
        """The first neighbour that is whole."""
        refusals: list[Refusal] = []
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

    def _room_for(self, sample: Sample, room: Room | Stretch | None) -> Room | Stretch | None:
        """The room of one sample for another one; None where its files do not fill it."""
        if self._joined is None or not isinstance(room, Stretch):
            return room
        files = self._joined(sample)
        return Stretch(files, room.memory) if files.size == len(room.memory) else None

    def _refusal(self, place: Place, error: HeadraceError) -> Refusal:
        sample = place.sample
        for_good = self._quarantine.condemned(place) is not None
        url = self._plan.datasets[place.source].url
        offset = _offset(sample, self._work.members(sample))
        return Refusal(sample.id, sample.key, sample.shard, offset, error.code, str(error), for_good, url, place.source)


def _which(place: Place) -> tuple[int, int]:
    """Its sample."""
    return place.source, place.sample.id


def _together(needs: Sequence[Needs]) -> Needs:
    """What several places of one sample need."""
    first, *others = needs
    return {ext: together([runs, *(one.get(ext, ()) for one in others)]) for ext, runs in first.items()}


def _drawn(room: Room | Stretch | None) -> Room | None:
    """Room that a work can draw in."""
    return None if isinstance(room, Stretch) else room


def _offset(sample: Sample, exts: Sequence[str]) -> int:
    """Where the first of these members begins in its shard."""
    return next((member.offset for ext in exts for member in sample.members if member.ext == ext), 0)
