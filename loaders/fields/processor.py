"""The processor of `Loader`: it makes the values of all fields of a sample.

Purpose: pixels and sound come from the processors of `VideoLoader` and `AudioLoader`, under the names of the fields.
`Field.decode` makes all other values.
Invariants: those of `headrace.loaders.interfaces`. All fields of a sample are made from the same files, each of which is
read once. Values are in the order of the fields.
Failure behaviour: the first damaged field makes the sample a bad sample, and the error names the field. Other errors of
`Field.decode` and of the transform are raised, with a note that names the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.sample import Sample
from headrace.loaders.decode.base import Fit
from headrace.loaders.fetch.byte_ranges import union
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.interfaces import (
    DAMAGE,
    FetchedSample,
    FieldsLayout,
    Needs,
    ProcessedSample,
    Processor,
    SampleLayout,
    SampleRef,
)
from headrace.loaders.processors.video import ClipSpec
from headrace.loaders.processors.wrappers import ProcessorWrapper, transform_generator

FieldsTransform = Callable[[dict[str, Any], torch.Generator], Mapping[str, Any]]


class MediaFields(msgspec.Struct, frozen=True):
    """Fields whose values `processor` makes.

    Args:
        processor: makes the values of one or two fields.
        names: the name of a field or entry, by the name that the processor uses.
        draws: whether it may write pixels into the memory of the batch.
    """

    processor: Processor
    names: Mapping[str, str]
    draws: bool = False


class FieldsProcessor:
    """Makes the values of all fields.

    Args:
        media: the fields of pixels and sound.
        fields: all other fields, by name.
        order: the names of all fields, in the order of the batch's entries.
        layout: how the batch holds them.
        aligned: for each mask with `like`, the format of the clips that it is aligned with, by stream.
    """

    def __init__(
        self,
        media: Sequence[MediaFields],
        fields: Mapping[str, Field],
        order: Sequence[str],
        layout: FieldsLayout,
        aligned: Mapping[str, Sequence[ClipSpec]],
    ) -> None:
        self._media, self._fields, self._order, self._layout = tuple(media), dict(fields), tuple(order), layout
        self._aligned = dict(aligned)

    @property
    def layout(self) -> SampleLayout:
        numbers = {
            part.names[name]: dtype
            for part in self._media
            for name, dtype in part.processor.layout.numbers.items()
            if name in part.names
        }
        return SampleLayout(self._order, numbers, fields=self._layout)

    def needs(self, ref: SampleRef) -> Needs:
        needs: dict[str, Any] = {}
        for part in self._media:
            for ext, runs in part.processor.needs(ref).items():
                needs[ext] = _joined(needs[ext], runs) if ext in needs else runs
        there = {member.ext for member in ref.sample.members}
        for field in self._fields.values():
            needs |= {ext: None for ext in field.files if ext in there or field.required}
        return needs

    def cost(self, sample: Sample) -> int:
        media = sum(part.processor.cost(sample) for part in self._media)
        return media + sum(field.nbytes(sample) for field in self._fields.values())

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        values: list[dict[str, Any]] = [{} for _ in fetched]
        numbers: list[dict[str, Any]] = [{} for _ in fetched]
        errors: list[HeadraceError | None] = [None] * len(fetched)
        for part in self._media:
            inputs = fetched if part.draws else [replace(sample, target=None) for sample in fetched]
            for slot, result in enumerate(part.processor.process(inputs)):
                if isinstance(result, HeadraceError):
                    errors[slot] = errors[slot] or result
                    continue
                values[slot] |= {part.names[name]: tensor for name, tensor in result.tensors.items()}
                numbers[slot] |= {part.names[name]: n for name, n in result.values.items() if name in part.names}
        for slot, sample in enumerate(fetched):
            errors[slot] = errors[slot] or self._decode(sample, values[slot])
        return [
            error or ProcessedSample(sample.ref.sample, {name: of[name] for name in self._order}, extra)
            for sample, error, of, extra in zip(fetched, errors, values, numbers, strict=True)
        ]

    def close(self) -> None:
        for part in self._media:
            part.processor.close()

    def _decode(self, fetched: FetchedSample, values: dict[str, Any]) -> HeadraceError | None:
        """Add the values of the other fields. Returns the error if one of them is damaged."""
        sample = fetched.ref.sample
        for name, field in self._fields.items():
            if not field.required and not all(ext in fetched.media for ext in field.files):
                values[name] = None
                continue
            files = {ext: fetched.media[ext][:] for ext in field.files}
            try:
                values[name] = field.decode(FieldInput(sample, files, fetched.ref))
                if name in self._aligned:
                    values[name] = align_mask(values[name], fetched.ref, self._aligned[name])
            except DAMAGE as error:
                return type(error)(f"field {name!r}: {error.message}", hint=error.hint)
            except Exception as error:
                error.add_note(f"in the field {name!r}, for sample {sample.key!r}")
                raise
        return None


def align_mask(mask: Any, ref: SampleRef, specs: Sequence[ClipSpec]) -> Any:
    """Scale, crop, mirror and rotate a mask as the frames of the sample's video. `specs` are indexed by stream."""
    from headrace.loaders.fields.pictures import fit_mask

    spec, video = specs[ref.stream if len(specs) > 1 else 0], ref.sample.video
    if video is None:
        raise UnsupportedError("the sample has no video that the mask could be aligned with")
    rotation = video.rotation % 360 if spec.rotate else 0
    image = (video.width, video.height) if rotation in (90, 270) else (video.height, video.width)
    fit = Fit(spec.size or image, spec.antialias, spec.cut.at(ref), spec.cut.mirrored(ref))
    return fit_mask(mask, fit, rotation=rotation, image=image)


class TransformedFields(ProcessorWrapper):
    """Calls `transform(values, generator)` for every sample, in the thread that decoded it.

    The batch holds the returned values, which may have other names.
    """

    def __init__(self, inner: Processor, transform: FieldsTransform) -> None:
        super().__init__(inner)
        self._transform = transform

    def _inputs(self, fetched: Sequence[FetchedSample]) -> Sequence[FetchedSample]:
        """Withhold the batch's memory: tensors that the transform keeps, or returns as views, must own their memory."""
        return [replace(sample, target=None) for sample in fetched]

    def _extend(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        values = {name: _owned(value) for name, value in finished.tensors.items()}
        try:
            returned: object = self._transform(values, transform_generator(ref))
        except Exception as error:
            error.add_note(f"in the loader's transform, for sample {finished.sample.key!r}")
            raise
        if not isinstance(returned, Mapping) or not returned or not all(isinstance(name, str) for name in returned):
            raise UsageError(
                f"the loader's transform returned {type(returned).__name__}",
                hint="return a dict with a value for each entry of the batch",
            )
        return replace(finished, tensors=dict(returned))


def _owned(value: Any) -> Any:
    """Arrays as tensors that own their memory. A transform may keep or change them."""
    return torch.from_numpy(value.copy()) if hasattr(value, "__array_interface__") else value


def _joined(runs: Any, others: Any) -> Any:
    """The ranges of a file that two processors need. None is the whole file."""
    return None if runs is None or others is None else union([runs, others])
