"""The types that the components of a loader exchange. Read this module first.

A sample passes through a loader in four steps:

1. A `Plan` names the sample by a `SampleRef`.
2. The `Processor` says which files, or which ranges of files, must be read (`Needs`).
3. The bytes are read and verified (`FetchedSample`).
4. The processor turns the bytes into a `ProcessedSample`, which becomes part of a batch.

Invariants: a plan is a pure function of its description, so the samples of batch t of an epoch do not depend on earlier
batches. A processor's result is a pure function of its input. All random numbers for a sample are drawn from
`SampleRef.key`. So a resumed run, another world size and a repeated epoch draw the same numbers. Types with thousands
of instances are not tracked by the garbage collector (`gc=False`); none of their instances is part of a reference
cycle.
Failure behaviour: a processor returns an error in place of each damaged sample. It raises only for errors that are not
the fault of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy.typing as npt

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.sample import Files, Sample
from headrace.loaders.clip import ClipTimes
from headrace.loaders.sampling.permutation import U64, key_of

if TYPE_CHECKING:  # so that the order of samples needs no torch
    import torch

    from headrace.dataio.shards.dataset import Dataset
    from headrace.loaders.batch.batch import Output
    from headrace.loaders.fetch.byte_ranges import Runs
    from headrace.loaders.fetch.partial_file import Media
    from headrace.loaders.quarantine.records import SkippedSample

DAMAGE = (CorruptionError, UnsupportedError, CapacityError)
"""Errors that are the fault of one sample. All other errors are raised to the trainer."""

Needs = Mapping[str, "Runs | None"]
"""The byte ranges to read of each file of a sample, by file extension; None for the whole file. The ranges are a
prediction: decoders may read others."""

PixelTarget = Callable[[tuple[int, ...]], "npt.NDArray[Any] | None"]
"""Returns the batch's memory for a clip of this shape, or None if the batch does not store such pixels. The shape is
(T, 3, H, W), or that of planes.
"""


class FileTarget(NamedTuple):
    """The batch's memory for these files, which are stored one after the other."""

    files: Files
    memory: memoryview


class ArrayPlace(msgspec.Struct, frozen=True, gc=False):
    """The memory of an entry of arrays, which are stored at the ends of files.

    Args:
        prefix: the bytes before the array in each file.
        memory: the arrays of all slots of the batch.
        size: bytes of an array.
    """

    prefix: bytes
    memory: memoryview
    size: int


class ArrayTargets(msgspec.Struct, frozen=True, gc=False):
    """The batch's memory for the arrays of the sample in `slot`. `places` are by the extension of the file."""

    places: Mapping[str, ArrayPlace]
    slot: int


IN_PLACE: Any = object()
"""Stands for a value that is in the batch already."""


class RowSpan(msgspec.Struct, frozen=True, gc=False):
    """The place of a piece of a recording in a packed row.

    `length` units of the recording, beginning at unit `start`, are placed at offset `at` of row `row`. A unit is a
    sample at the output sample rate, or a spectrogram column.
    """

    row: int
    at: int
    start: int
    length: int


class BadSamples(Protocol):
    """The samples that were known to be damaged when a batch was planned."""

    def refuses(self, ref: SampleRef) -> HeadraceError | None:
        """The reason for which this sample is skipped, or None."""
        ...


class SampleRef(msgspec.Struct, frozen=True, gc=False):
    """One part (a clip, a window) of one sample, at one position of the order.

    Args:
        epoch: epoch of the sample's source; random numbers depend on it.
        virtual: index of this part among all parts of its stream.
        sample: the sample, as read from the index.
        number: index of this part among the parts of its sample.
        attempt: number of substitutes that were tried before this one.
        source: index of the dataset in the plan.
        seed: seed of the source.
        stream: index of the stream (a source, a bucket) in the plan.
        span: place of the part in a row of the batch, if several parts share a row.
        known_bad: the shared list of bad samples, if the loader follows one.
    """

    epoch: int
    virtual: int
    sample: Sample
    number: int = 0
    attempt: int = 0
    source: int = 0
    seed: int = 0
    stream: int = 0
    span: RowSpan | None = None
    known_bad: BadSamples | None = None

    def key(self, purpose: int) -> U64:
        """The key from which random numbers for this part and `purpose` are drawn."""
        return key_of(purpose, self.seed, self.epoch, self.sample.id, self.number, self.attempt)


class BatchSource(Protocol):
    """The batches of one rank, in order."""

    def batches_in(self, epoch: int) -> int:
        """Number of batches in an epoch, at least one."""
        ...

    def refs(self, epoch: int, batches: range) -> Sequence[Sequence[SampleRef]]:
        """This rank's share of each of these global batches. A share may be empty."""
        ...


class Plan(BatchSource, Protocol):
    """One rank's share of an order."""

    @property
    def datasets(self) -> Sequence[Dataset]:
        """The datasets, indexed by `SampleRef.source`."""
        ...

    def substitute(self, ref: SampleRef, attempt: int) -> SampleRef | None:
        """The sample that replaces `ref` after `attempt` damaged substitutes, or None if none is left."""
        ...


class FetchedSample(msgspec.Struct, frozen=True, gc=False):
    """A sample whose bytes were read and verified.

    Args:
        ref: the sample.
        media: its files by extension. A file of which only ranges were read reads further ranges on demand.
        target: the batch's memory, into which "video" may be decoded. The batch ignores its content if processing
            fails.
        files: the files, if they were read directly into the batch; `media` is empty then.
        placed: extensions of files whose arrays were read directly into the batch; `media` lacks these files.
        times: when the frames of the clips are shown that were decoded before, by the names of their fields.
    """

    ref: SampleRef
    media: Mapping[str, Media]
    target: PixelTarget | None = None
    files: Files | None = None
    placed: Collection[str] = ()
    times: Mapping[str, ClipTimes] = {}


class ProcessedSample(msgspec.Struct, frozen=True, gc=False):
    """A processed sample, ready to be added to the batch.

    Args:
        sample: the sample that was processed, which may be a substitute.
        tensors: stacked in the batch. A sample without tensors is left out of the batch. In a batch of fields, the
            values of the fields, of any type; None if a sample lacks an optional field, and `IN_PLACE` if the value is
            in the batch already.
        values: further values, which the batch holds as tensors or lists (see `SampleLayout.numbers`).
        skipped: the damaged samples that this one replaces.
        in_place: True if the bytes of the tensors are in the batch already.
        prefixes: for arrays that are stored at the end of a file: the file's extension and the bytes before the array,
            by the name of the value.
        times: when the frames of a clip are shown.
    """

    sample: Sample
    tensors: Mapping[str, Any]
    values: Mapping[str, Any] = {}
    skipped: tuple[SkippedSample, ...] = ()
    in_place: bool = False
    prefixes: Mapping[str, tuple[str, bytes]] = {}
    times: ClipTimes | None = None


class RowLayout(msgspec.Struct, frozen=True):
    """The layout of rows of packed recordings, which are float32.

    Args:
        capacity: samples or spectrogram columns in a row; the length of its last axis.
        shape: the other axes of a row.
        silence: the value where a row holds no piece.
    """

    capacity: int
    shape: tuple[int, ...]
    silence: float = 0.0


Collate = Literal["stack", "pad", "concat", "list"] | Callable[[Sequence[Any]], Any]
"""How the values of a batch's samples become one entry:

- "stack": a tensor (B, ...). All values have the same shape.
- "pad": a tensor (B, L, ...), where L is the length of the longest value. Shorter ones are followed by zeros. The entry
  `<name>.lengths`, int64 (B,), has the lengths.
- "concat": a tensor (sum of lengths, ...). The entry `<name>.offsets`, int64 (B + 1,), has the position of each value
  and the end.
- "list": a list of the values.
- A function: called with the list of values. Its result is the entry.
"""


class FieldsLayout(msgspec.Struct, frozen=True):
    """How a batch holds fields.

    Args:
        collate: how each entry is made of the samples' values. Tensors and arrays that are not named here are stacked,
            and other values are in lists.
        optional: entries that some samples may lack. Their value is None.
        pixels: the format of each entry of pixels, (T, 3, H, W).
        images: entries of pixels or planes that have no axis for time in the batch.
        planes: the dtype of each entry of planes, (T, H * 3 / 2, W).
        drawn: the entry that decoders may write into the batch's memory.
        in_place: entries of arrays that may be read directly into the batch (see `Field.in_place`).
    """

    collate: Mapping[str, Collate] = {}
    optional: frozenset[str] = frozenset()
    pixels: Mapping[str, Output] = {}
    images: frozenset[str] = frozenset()
    planes: Mapping[str, torch.dtype] = {}
    drawn: str | None = None
    in_place: frozenset[str] = frozenset()


class SampleLayout(msgspec.Struct, frozen=True):
    """Names and types of a processor's results, known before the first sample.

    Args:
        tensors: names of the tensors.
        numbers: dtype of each value in the batch; None for a list.
        rows: set if samples are packed into rows.
        files_of: set if samples are delivered as stored, in one run of bytes. Returns the files of a sample.
        fields: set if the batch is made of fields. The names of `tensors` are then the fields.
    """

    tensors: tuple[str, ...]
    numbers: Mapping[str, torch.dtype | None] = {}
    rows: RowLayout | None = None
    files_of: Callable[[Sample], Files] | None = None
    fields: FieldsLayout | None = None


class Processor(Protocol):
    """Turns the bytes of samples into tensors. Safe to share between threads."""

    @property
    def layout(self) -> SampleLayout: ...

    def needs(self, ref: SampleRef) -> Needs:
        """The files and ranges to read of the sample. Whether a file is read in part depends on the sample only."""
        ...

    def cost(self, sample: Sample) -> int:
        """Bytes that processing one part takes, in addition to the files that are read."""
        ...

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        """For each sample, in the same order, the processed sample or its error."""
        ...

    def close(self) -> None:
        """Release all resources. The processor is not used afterwards."""
        ...
