"""The types that the parts of a loader hand to each other. Read this first.

A sample goes one way: a `Plan` names it by a `SampleRef`. Its `Processor` says once which files, or pieces of files, it
`Needs`. Its bytes are read and checked (`FetchedSample`). The processor turns them into a `ProcessedSample`, and these
fill a batch.

Invariants: a plan is a pure function of its description, so the samples of batch t of an epoch do not depend on
anything that happened before. A processor's result is a pure function of what it was given. All randomness of a sample
is drawn from `SampleRef.key`, so a resumed run, another world size and a repeated epoch draw the same. Types with
thousands of instances are not tracked by the garbage collector (`gc=False`); nothing that they refer to refers to them.
Failure behaviour: a processor returns an error in place of each damaged sample. It raises only when it fails as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.sample import Files, Sample
from headrace.loaders.sampling.permutation import U64, key_of

if TYPE_CHECKING:  # so that the order of samples needs no torch
    import torch

    from headrace.dataio.shards.dataset import Dataset
    from headrace.loaders.fetch.byte_ranges import Runs
    from headrace.loaders.fetch.partial_file import Media
    from headrace.loaders.quarantine.records import SkippedSample

DAMAGE = (CorruptionError, UnsupportedError, CapacityError)
"""Errors of a sample. All other errors are not the sample's fault, and are raised to the trainer."""

Needs = Mapping[str, "Runs | None"]
"""What is read of a sample, by file extension: some pieces of the file, or None for the whole file. Pieces are a
forecast: decoders may read others."""

PixelTarget = Callable[[tuple[int, ...]], "npt.NDArray[np.uint8] | None"]
"""Returns the memory in which a batch will hold pixels of this shape, (T, 3, H, W); None if it will hold something
else."""


class FileTarget(NamedTuple):
    """The memory in which a batch will hold these files, one after the other."""

    files: Files
    memory: memoryview


class RowSpan(msgspec.Struct, frozen=True, gc=False):
    """Where a piece of a recording goes: `length` samples at the wanted rate, from its `start`, to `at` in row
    `row`."""

    row: int
    at: int
    start: int
    length: int


class BadSamples(Protocol):
    """The bad samples that were known when a batch was planned."""

    def refuses(self, ref: SampleRef) -> HeadraceError | None:
        """Why this sample is skipped, or None."""
        ...


class SampleRef(msgspec.Struct, frozen=True, gc=False):
    """One part (a clip, a window) of one sample, at one position of the order.

    Args:
        epoch: the epoch of the sample's source, which enters everything that is drawn.
        virtual: number of this part in the order of its stream.
        sample: the sample, as the index has it.
        number: number of this part in its sample.
        attempt: how many substitutes were tried before this one.
        source: number of the dataset in the plan.
        seed: the seed of the source.
        stream: number of the stream (a source, a bucket) in the plan.
        span: where the part goes, if several share a row of the batch.
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
        """The key of everything that is drawn for this part and `purpose`."""
        return key_of(purpose, self.seed, self.epoch, self.sample.id, self.number, self.attempt)


class BatchSource(Protocol):
    """The batches of one rank, one after the other."""

    def batches_in(self, epoch: int) -> int:
        """Batches in an epoch, at least one."""
        ...

    def refs(self, epoch: int, batches: range) -> Sequence[Sequence[SampleRef]]:
        """This rank's share of each of these global batches. A share may be empty."""
        ...


class Plan(BatchSource, Protocol):
    """One rank's share of an order."""

    @property
    def datasets(self) -> Sequence[Dataset]:
        """The datasets, by `SampleRef.source`."""
        ...

    def substitute(self, ref: SampleRef, attempt: int) -> SampleRef | None:
        """The sample that replaces `ref` after `attempt` damaged substitutes; None if there is none left."""
        ...


class FetchedSample(msgspec.Struct, frozen=True, gc=False):
    """A sample whose bytes were read and checked.

    Args:
        ref: the sample.
        media: its files by extension; those that are needed in part read further pieces themselves.
        target: memory of the batch in which "video" may be drawn. Its content counts only once the sample is processed.
        files: the files, if they were read directly into the batch; `media` is empty then.
    """

    ref: SampleRef
    media: Mapping[str, Media]
    target: PixelTarget | None = None
    files: Files | None = None


class ProcessedSample(msgspec.Struct, frozen=True, gc=False):
    """A sample as the batch takes it.

    Args:
        sample: the sample that was processed, maybe a substitute.
        tensors: stacked in the batch. Without tensors the sample is left out.
        values: listed in the batch.
        skipped: the damaged samples that this one replaces.
        in_place: the bytes of the tensors are in the batch already.
    """

    sample: Sample
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any] = {}
    skipped: tuple[SkippedSample, ...] = ()
    in_place: bool = False


class RowLayout(msgspec.Struct, frozen=True):
    """Rows of packed recordings: `capacity` samples, or columns of spectrograms, of float32 of this `shape`.

    `silence` fills the stretches without a piece.
    """

    capacity: int
    shape: tuple[int, ...]
    silence: float = 0.0


class SampleLayout(msgspec.Struct, frozen=True):
    """What the samples of a processor consist of, known before the first one.

    Args:
        tensors: names of the tensors.
        numbers: dtype of each value in the batch; None for a list.
        rows: set if samples lie one after the other in rows.
        files_of: set if samples are delivered as stored, in one run of bytes: the files of a sample.
    """

    tensors: tuple[str, ...]
    numbers: Mapping[str, torch.dtype | None] = {}
    rows: RowLayout | None = None
    files_of: Callable[[Sample], Files] | None = None


class Processor(Protocol):
    """Turns the bytes of samples into tensors. Safe to share between threads."""

    @property
    def layout(self) -> SampleLayout: ...

    def needs(self, ref: SampleRef) -> Needs:
        """What is read of the sample. It depends on the sample alone whether a file is read in part."""
        ...

    def cost(self, sample: Sample) -> int:
        """Bytes that one part takes while it is processed, besides the files that are read."""
        ...

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        """For each sample, in the same order, the processed sample or what is wrong with it."""
        ...

    def close(self) -> None:
        """Release everything; the processor is not used afterwards."""
        ...
