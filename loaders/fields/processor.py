"""The processor of `Loader`: it makes the values of all fields of a sample.

Purpose: video and audio come from the processors of `VideoLoader` and `AudioLoader`, under the names of the fields.
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
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.sample import Sample
from headrace.loaders.clip import ClipTimes
from headrace.loaders.decode.base import Fit
from headrace.loaders.fetch.byte_ranges import union
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.interfaces import (
    DAMAGE,
    IN_PLACE,
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
        names: maps the names of the processor's results to the names of entries.
        draws: whether it may write pixels into the memory of the batch.
        video: the name of the `Video` field, if there is one. Other fields get the times of its frames.
        file: the extension of the file with the video, if it is not the sample's own video.
        absent: the values of a sample without that file, by the names of entries, if the field is optional.
    """

    processor: Processor
    names: Mapping[str, str]
    draws: bool = False
    video: str | None = None
    file: str | None = None
    absent: Mapping[str, Any] | None = None

    def is_absent(self, sample: Sample) -> bool:
        """Whether the sample lacks the optional file."""
        return self.absent is not None and all(member.ext != self.file for member in sample.members)

    def error_of(self, error: HeadraceError) -> HeadraceError:
        """The error with the name of the field, if samples have several videos."""
        if self.file is None or not isinstance(error, DAMAGE):
            return error
        return type(error)(f"field {self.video!r}: {error.message}", hint=error.hint)


class FieldsProcessor:
    """Makes the values of all fields.

    Args:
        media: the `Video` and `Audio` fields. Those that others are like come first.
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
        # arrays that may be read into the batch are views of their files otherwise
        self._costed = [field for name, field in fields.items() if name not in layout.in_place]
        whole = dict.fromkeys(ext for field in fields.values() for ext in field.files)
        self._fixed_needs = whole if not media and all(field.required for field in fields.values()) else None

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
        if self._fixed_needs is not None:
            return self._fixed_needs
        needs: dict[str, Any] = {}
        for part in self._media:
            if part.is_absent(ref.sample):
                continue
            for ext, runs in part.processor.needs(ref).items():
                needs[ext] = _joined(needs[ext], runs) if ext in needs else runs
        available = {member.ext for member in ref.sample.members}
        for field in self._fields.values():
            needs |= {ext: None for ext in field.files if ext in available or field.required}
        return needs

    def cost(self, sample: Sample) -> int:
        media = sum([part.processor.cost(sample) for part in self._media])
        return media + sum([field.nbytes(sample) for field in self._costed])

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        made = [_Made(one) for one in fetched]
        for part in self._media:
            _process_media(part, [one for one in made if one.error is None])
        for one in made:
            if one.error is None:
                one.error = self._decode(one)
        return [
            one.error
            or ProcessedSample(
                one.fetched.ref.sample,
                {name: one.values[name] for name in self._order},
                one.numbers,
                prefixes=one.prefixes,
            )
            for one in made
        ]

    def close(self) -> None:
        for part in self._media:
            part.processor.close()

    def _decode(self, made: _Made) -> HeadraceError | None:
        """Add the values of the other fields, and the bytes before them in their files.

        Returns the error if one of them is damaged.
        """
        fetched, values = made.fetched, made.values
        sample, placed, in_place = fetched.ref.sample, fetched.placed, self._layout.in_place
        shared = dict[Any, Any]()
        for name, field in self._fields.items():
            if placed and name in in_place and field.files[0] in placed:
                values[name] = IN_PLACE
                continue
            if not field.required and not all(ext in fetched.media for ext in field.files):
                values |= {name: None} | {f"{name}.{entry}": one for entry, one in field.entries.items()}
                continue
            files = {ext: fetched.media[ext][:] for ext in field.files}
            try:
                value = field.decode(FieldInput(sample, files, fetched.ref, made.times, shared))
                if name in self._aligned:
                    value = align_mask(value, fetched.ref, self._aligned[name])
                if field.entries:
                    value, further = value
                    values |= {f"{name}.{entry}": further[entry] for entry in field.entries}
                values[name] = value
                if name in in_place and (prefix := _prefix(files[field.files[0]], value)) is not None:
                    made.prefixes[name] = field.files[0], prefix
            except DAMAGE as error:
                return type(error)(f"field {name!r}: {error.message}", hint=error.hint)
            except Exception as error:
                error.add_note(f"in the field {name!r}, for sample {sample.key!r}")
                raise
        return None


class _Made:
    """What is made of one sample so far: values of entries, numbers, times of clips, or an error."""

    def __init__(self, fetched: FetchedSample) -> None:
        self.fetched = fetched
        self.values: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.times: dict[str, ClipTimes] = {}
        self.prefixes: dict[str, tuple[str, bytes]] = {}
        self.error: HeadraceError | None = None

    def add(self, part: MediaFields, result: ProcessedSample) -> None:
        """Add the values of `part`."""
        self.values |= {part.names[name]: tensor for name, tensor in result.tensors.items()}
        self.numbers |= {part.names[name]: n for name, n in result.values.items() if name in part.names}
        if part.video is not None and result.times is not None:
            self.times[part.video] = result.times

    def add_absent(self, part: MediaFields) -> None:
        """Add what stands for the values of an optional video."""
        self.values |= part.absent or {}
        numbers = part.processor.layout.numbers
        self.numbers |= {part.names[name]: 0 for name in numbers if name in part.names}


def _process_media(part: MediaFields, made: Sequence[_Made]) -> None:
    """Add the values or the errors of `Video` and `Audio` fields."""
    present = [one for one in made if not part.is_absent(one.fetched.ref.sample)]
    for one in made if len(present) < len(made) else ():
        if part.is_absent(one.fetched.ref.sample):
            one.add_absent(part)
    inputs = [one.fetched if part.draws and not one.times else _input_of(part, one) for one in present]
    for one, result in zip(present, part.processor.process(inputs), strict=True):
        if isinstance(result, HeadraceError):
            one.error = part.error_of(result)
        else:
            one.add(part, result)


def _input_of(part: MediaFields, made: _Made) -> FetchedSample:
    return replace(made.fetched, target=made.fetched.target if part.draws else None, times=made.times)


def align_mask(mask: Any, ref: SampleRef, specs: Sequence[ClipSpec]) -> Any:
    """Scale, crop, mirror and rotate a mask as the frames of the sample's video. `specs` are indexed by stream."""
    from headrace.loaders.fields.pictures import fit_mask

    spec = specs[ref.stream if len(specs) > 1 else 0]
    video = ref.sample.video_of(spec.file)
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
        """Do not write into the batch: tensors that the transform keeps, or returns as views, must own their memory."""
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
    """Copy an array into a tensor, which a transform may keep or change."""
    return torch.from_numpy(value.copy()) if hasattr(value, "__array_interface__") else value


def _prefix(file: memoryview, value: Any) -> bytes | None:
    """The bytes before an array that ends the file. None if the file does not end with the bytes of `value`."""
    if not isinstance(value, np.ndarray) or not value.nbytes or value.dtype == np.bool_:
        return None  # the bytes of bools are checked when they are decoded
    start = len(file) - value.nbytes
    if start < 0 or not value.flags.c_contiguous or not value.dtype.isnative:
        return None
    is_stored = _address(value) == _address(np.frombuffer(file, np.uint8)) + start
    return bytes(file[:start]) if is_stored else None


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _joined(runs: Any, others: Any) -> Any:
    """The pieces of a file that two processors need. None is the whole file."""
    return None if runs is None or others is None else union([runs, others])
