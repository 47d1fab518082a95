"""One place of the order to one finished clip: read, check, decode, fit, and stand in for what is damaged.

Purpose: everything that happens to a single sample, as one function that any thread may run.

Invariants: the result is a pure function of (dataset, order, epoch, place). A damaged sample is replaced by its neighbours in
`Order.substitute`'s order; nothing else of the batch or of the order changes.
Failure behaviour: only damage (corrupt, unsupported or oversize) is replaced; when `MAX_SUBSTITUTES` neighbours, or all
there are, are damaged as well, `CorruptionError` names the first. An unreachable store, wrong credentials and the like
are nobody's damage and are raised, so that a bad network never changes what is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from dataio.core.errors import CapacityError, CorruptionError, MillraceError, UnsupportedError
from dataio.core.trace import span
from dataio.shards.contract import Sample
from loaders.audio import AudioSpec, decode_audio
from loaders.clip import Clip, choose
from loaders.decode import resize
from loaders.decode.contract import Decoded, Decoder, Request
from loaders.order import Order
from loaders.quarantine import Quarantine, Refusal
from loaders.source import Source

MAX_SUBSTITUTES = 16
_DAMAGE = (CorruptionError, UnsupportedError, CapacityError)


@dataclass(frozen=True, slots=True)
class Place:
    """A virtual sample of an epoch, and the sample it is a clip of. `attempt` counts the substitutes before it."""

    epoch: int
    virtual: int
    sample: Sample
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """`video` uint8 (T, 3, H, W); `start` in seconds on the file's time line; `audio` float32 (C, S), its first
    `audio_samples` real; `refusals` are the samples that this one stands in for."""

    sample: Sample
    video: torch.Tensor
    start: float
    audio: torch.Tensor | None = None
    audio_samples: int = 0
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """What a finished clip is like."""

    clip: Clip
    size: tuple[int, int] | None = None
    rotate: bool = False
    audio: AudioSpec | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A clip whose bytes were read and checked."""

    place: Place
    request: Request
    members: Mapping[str, memoryview]


class ClipMaker:
    """Makes clips. `lookup` gives the sample of a number of the order. Safe to share between threads."""

    def __init__(
        self,
        order: Order,
        look: Look,
        source: Source,
        decoder: Decoder,
        quarantine: Quarantine,
        lookup: Callable[[int], Sample],
    ) -> None:
        self._order, self._look, self._source = order, look, source
        self._decoder, self._quarantine, self._lookup = decoder, quarantine, lookup

    def make(self, places: Sequence[Place]) -> list[Finished]:
        """The clips of `places`, decoded together where the decoder can."""
        outcomes = self._try(places)
        return [
            self._substitute(place, outcome) if isinstance(outcome, MillraceError) else outcome
            for place, outcome in zip(places, outcomes, strict=True)
        ]

    def _try(self, places: Sequence[Place]) -> list[Finished | MillraceError]:
        prepared = [self._prepare(place) for place in places]
        with span("decode", clips=len(places)):
            decoded = iter(self._decoder.decode([p.request for p in prepared if isinstance(p, _Prepared)]))
        return [self._finish(p, next(decoded)) if isinstance(p, _Prepared) else p for p in prepared]

    def _prepare(self, place: Place) -> _Prepared | MillraceError:
        """Read and check the bytes, choose the frames."""
        sample = place.sample
        known = self._quarantine.condemned(sample.id)
        if known:
            return known
        try:
            members = self._source.fetch(sample, members_of(sample, self._look))
        except CorruptionError as error:
            self._quarantine.condemn(sample.id, error)
            return error
        if sample.video is None:
            return UnsupportedError("the sample holds no video")
        try:
            number = place.virtual % self._look.clip.per_video
            wanted = choose(
                sample.video, self._look.clip, self._order.seed, place.epoch, sample.id, number, place.attempt
            )
        except CorruptionError as error:
            return error
        return _Prepared(place, Request(members[sample.video.ext], sample.video, wanted), members)

    def _finish(self, prepared: _Prepared, decoded: Decoded | MillraceError) -> Finished | MillraceError:
        if isinstance(decoded, MillraceError):
            return decoded
        info, frames = prepared.request.info, decoded.frames
        start = decoded.pts[0] * info.time_base
        try:
            audio, real = self._sound(prepared, start)
        except _DAMAGE as error:
            return error
        if self._look.rotate:
            frames = resize.rotate(frames, info.rotation)
        return Finished(prepared.place.sample, resize.fit(frames, self._look.size), float(start), audio, real)

    def _sound(self, prepared: _Prepared, start: Fraction) -> tuple[torch.Tensor | None, int]:
        spec, info = self._look.audio, prepared.place.sample.audio
        if spec is None:
            return None, 0
        samples = spec.samples(self._look.clip)
        if info is None:
            return torch.zeros(spec.channels, samples), 0
        video = prepared.request.info
        if info.ext != video.ext:  # a file of its own: it begins when the video does
            start -= video.start_pts * video.time_base
        sound, real = decode_audio(prepared.members[info.ext], info, start, spec, samples)
        return torch.from_numpy(sound), real

    def _substitute(self, place: Place, error: MillraceError) -> Finished:
        """The first neighbour that can be decoded."""
        refusals: list[Refusal] = []
        clips, refused, first = self._look.clip.per_video, place, error
        for attempt in range(MAX_SUBSTITUTES):
            if not isinstance(error, _DAMAGE):
                raise error
            refusals.append(self._refusal(refused.sample, error))
            virtual = self._order.substitute(place.virtual, attempt, clips)
            if virtual is None:
                break
            refused = Place(place.epoch, virtual, self._lookup(virtual // clips), attempt + 1)
            outcome = self._try([refused])[0]
            if not isinstance(outcome, MillraceError):
                return replace(outcome, refusals=tuple(refusals))
            error = outcome
        raise CorruptionError(
            f"sample {place.sample.key!r} is damaged ({first.message}), and so is every sample that could stand in for it",
            hint="check the dataset with `millrace verify`",
        ) from first

    def _refusal(self, sample: Sample, error: MillraceError) -> Refusal:
        ext = sample.video.ext if sample.video else None
        offset = next((member.offset for member in sample.members if member.ext == ext), 0)
        for_good = self._quarantine.condemned(sample.id) is not None
        return Refusal(sample.id, sample.key, sample.shard, offset, error.code, str(error), for_good)


def members_of(sample: Sample, look: Look) -> list[str]:
    """The extensions of the members that a clip of `sample` needs."""
    infos = (sample.video, sample.audio if look.audio else None)
    return [info.ext for info in infos if info is not None]
