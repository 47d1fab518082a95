"""What the parts of a loader hand to each other. Read this first.

A `Plan` says which `SampleRef`s a batch holds; for each place the bytes are read and checked (`FetchedSample`), a
`Processor` turns them into a `ProcessedSample` sample, and finished samples fill a batch.

Invariants: a plan is a pure function of its description: which places batch t of an epoch holds depends on nothing that
happened before. A work's result is a pure function of what it was given. Everything random about a sample is drawn from
`SampleRef.key`, so that a resumed run, another world size and a repeated epoch draw the same. The garbage collector is
spared what there are thousands of (`gc=False`): nothing that these refer to refers to them.
Failure behaviour: a work returns, at the place of each bad sample, the error that names what is wrong with it; it
raises only when it fails as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.contract import Files, Sample
from headrace.loaders.sampling.permutation import U64, key_of

if TYPE_CHECKING:  # so that the order of samples needs no torch
    import torch

    from headrace.dataio.shards.dataset import Dataset
    from headrace.loaders.partial.file import Media
    from headrace.loaders.partial.needed import Runs
    from headrace.loaders.quarantine.records import SkippedSample

DAMAGE = (CorruptionError, UnsupportedError, CapacityError)
"""Errors of a sample. All other errors are not the sample's fault, and are raised to the trainer."""


class RowSpan(msgspec.Struct, frozen=True, gc=False):
    """Where a piece of a recording goes: `length` samples at the wanted rate from its `start`, to `at` in a row."""

    row: int
    at: int
    start: int
    length: int


class BadSamples(Protocol):
    """What was known of bad samples when a place was planned."""

    def refuses(self, place: SampleRef) -> HeadraceError | None:
        """Why the sample of this place is not read, or None."""
        ...


class SampleRef(msgspec.Struct, frozen=True, gc=False):
    """Part `number` (a clip, a window) of `sample`, a sample of the plan's dataset number `source`.

    `virtual` is the place's number in the order, `attempt` counts the substitutes before it. `seed` and `epoch` are
    those of the source, and enter what is drawn for the sample. `stream` is the plan's list of samples that the place
    is of: a source, a bucket. `fit` is there where several places share a row of the batch, `asof` where a list of bad
    samples is gone by.
    """

    epoch: int
    virtual: int
    sample: Sample
    number: int = 0
    attempt: int = 0
    source: int = 0
    seed: int = 0
    stream: int = 0
    fit: RowSpan | None = None
    asof: BadSamples | None = None

    def key(self, purpose: int) -> U64:
        """The key of everything that is drawn for this place and `purpose`."""
        return key_of(purpose, self.seed, self.epoch, self.sample.id, self.number, self.attempt)


class BatchSource(Protocol):
    """One rank's batches, one after the other."""

    def batches_in(self, epoch: int) -> int:
        """Batches in an epoch: one at least."""
        ...

    def places(self, epoch: int, batches: range) -> Sequence[Sequence[SampleRef]]:
        """This rank's parts of these global batches; some may be empty."""
        ...


class Plan(BatchSource, Protocol):
    """One rank's share of an order."""

    @property
    def datasets(self) -> Sequence[Dataset]:
        """What places read from, by `SampleRef.source`."""
        ...

    def substitute(self, place: SampleRef, attempt: int) -> SampleRef | None:
        """Who stands in for `place` when it and `attempt` substitutes are damaged; None when nobody is left."""
        ...


PixelTarget = Callable[[tuple[int, ...]], "npt.NDArray[np.uint8] | None"]
"""Where a batch will hold pixels of this shape, (T, 3, H, W); None when it will hold something else."""


class FileTarget(NamedTuple):
    """Where a batch will hold these files, one after the other."""

    files: Files
    memory: memoryview


class FetchedSample(msgspec.Struct, frozen=True, gc=False):
    """A place whose bytes were read and checked: `members` by extension, which may read themselves. "video" may be
    drawn in the `room` that its batch has for it, which holds nothing until the sample is finished. What is delivered
    as it is was read to where it belongs: `joined`, and `members` is empty."""

    place: SampleRef
    members: Mapping[str, Media]
    room: PixelTarget | None = None
    joined: Files | None = None


class ProcessedSample(msgspec.Struct, frozen=True, gc=False):
    """`tensors` are stacked in the batch, `values` are listed there; `refusals` are the samples that this one stands in
    for.

    `in_place`: the bytes of its tensors are in the batch already.
    """

    sample: Sample
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any] = {}
    refusals: tuple[SkippedSample, ...] = ()
    in_place: bool = False


class RowLayout(msgspec.Struct, frozen=True):
    """`capacity` samples of sound, or columns of spectrograms, float32 of this `shape` each; `silence` is what lies
    where no piece is."""

    capacity: int
    shape: tuple[int, ...]
    silence: float = 0.0


class SampleLayout(msgspec.Struct, frozen=True):
    """What a work's samples consist of, known before the first: names of `tensors`, and the dtype of each of `numbers`
    (None: a list). With `rows`, samples lie one after the other in rows; with `joined`, which says which
    files each is, in one run of bytes."""

    tensors: tuple[str, ...]
    numbers: Mapping[str, torch.dtype | None] = {}
    rows: RowLayout | None = None
    joined: Callable[[Sample], Files] | None = None


class Processor(Protocol):
    """What is done to the bytes of samples. Safe to share between threads."""

    @property
    def layout(self) -> SampleLayout: ...

    def members(self, sample: Sample) -> list[str]:
        """The extensions of the members that are needed."""
        ...

    def partial(self, place: SampleRef) -> Mapping[str, Runs]:
        """Of which of the members only some pieces are needed, by extension, and which, as far as that is foreseen.
        Whether a member is among them depends on the sample alone."""
        ...

    def cost(self, sample: Sample) -> int:
        """Bytes that a part of it takes while it is made, beside its compressed members."""
        ...

    def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        """The finished sample of each, or what is wrong with it, in the same order."""
        ...

    def close(self) -> None:
        """Release what is held; the work is not used afterwards."""
        ...
