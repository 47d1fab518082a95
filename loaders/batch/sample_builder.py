"""Build a `ProcessedSample` from a `SampleRef`: read, verify, process, and substitute damaged samples.

Purpose: one function that does all the work for a sample, and that any thread may call.

Invariants: the result depends only on the plan, the sample's position and the stored bytes. A damaged sample is
replaced by a substitute from the plan. The rest of the batch and of the order does not change.
Failure behaviour: only damaged samples (corrupt, unsupported or too large) are replaced. If `MAX_SUBSTITUTES`
substitutes, or all that exist, are damaged too, `CorruptionError` names the first sample. If none of them has a value
that a field can use, it is a `UsageError`. Other errors, such as an unreachable store or wrong credentials, are raised,
so a bad network never changes the training data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.core.tracing import span
from headrace.dataio.shards.sample import Files
from headrace.loaders.batch.memory import MemoryBudget
from headrace.loaders.cancellation import check_cancelled
from headrace.loaders.fetch.byte_ranges import union
from headrace.loaders.fetch.sample_reader import Range, SampleReader, spans
from headrace.loaders.interfaces import (
    DAMAGE,
    ArrayTargets,
    FetchedSample,
    FileTarget,
    Needs,
    PixelTarget,
    Plan,
    ProcessedSample,
    Processor,
    SampleRef,
)
from headrace.loaders.quarantine.quarantine import Quarantine, misnamed_error
from headrace.loaders.quarantine.records import SkippedSample

MAX_SUBSTITUTES = 16
OnError = Literal["replace", "skip"]
Target = PixelTarget | FileTarget | ArrayTargets | None
"""The batch's memory for a sample. None if the sample is copied into the batch later."""


class PlannedRead(msgspec.Struct, frozen=True, gc=False):
    """The files or pieces that are read for a sample, and their total size in bytes."""

    needs: Needs
    nbytes: int


class PlannedBatch(msgspec.Struct, frozen=True):
    """A batch that is planned but not built.

    Args:
        refs: its samples.
        reads: the planned read of each sample.
        ranges: the same reads as ranges of objects, by the index of the dataset; these are announced to the readers.
        files: the files of each sample, if they are delivered as stored.
    """

    refs: Sequence[SampleRef]
    reads: Sequence[PlannedRead]
    ranges: Mapping[int, Sequence[Range]] = {}
    files: Sequence[Files] | None = None


class SampleBuilder:
    """Builds samples. Safe to share between threads.

    Args:
        plan: provides the datasets and the substitutes.
        processor: turns bytes into tensors.
        readers: one reader for each of the plan's datasets.
        quarantine: the samples that are known to be damaged.
        memory: limits the bytes of samples in processing.
        on_error: "replace" substitutes another sample for a damaged one; "skip" leaves the sample out of its batch.
    """

    def __init__(
        self,
        plan: Plan,
        processor: Processor,
        readers: Sequence[SampleReader],
        *,
        quarantine: Quarantine,
        memory: MemoryBudget,
        on_error: OnError = "replace",
    ) -> None:
        self._plan, self._processor, self._readers = plan, processor, readers
        self._quarantine, self._memory, self._on_error = quarantine, memory, on_error
        self._files_of = processor.layout.files_of

    def plan(self, refs: Sequence[SampleRef]) -> PlannedBatch:
        """Plan what is read for each sample, as far as the index allows."""
        reads, by_source = list[PlannedRead](), dict[int, list[Range]]()
        files = None if self._files_of is None else [self._files_of(ref.sample) for ref in refs]
        for number, ref in enumerate(refs):
            needs = self._processor.needs(ref)
            ranges = self._readers[ref.source].ranges(ref.sample, needs) if files is None else spans(files[number])
            by_source.setdefault(ref.source, []).extend(ranges)
            reads.append(PlannedRead(needs, sum([length for _, _, length in ranges])))
        return PlannedBatch(refs, reads, by_source, files)

    def build(
        self, refs: Sequence[SampleRef], targets: Sequence[Target], reads: Sequence[PlannedRead]
    ) -> list[ProcessedSample]:
        """The processed samples of `refs`.

        The samples are processed together if the processor can, possibly directly in their targets. A sample without
        tensors is left out of its batch.
        """
        return [
            self._replace_or_skip(ref, target, outcome) if isinstance(outcome, HeadraceError) else outcome
            for ref, target, outcome in zip(refs, targets, self._fetch_and_process(refs, targets, reads), strict=True)
        ]

    def announce(self, ranges: Mapping[int, Sequence[Range]]) -> None:
        """Tell each dataset's reader which ranges will be read next, soonest first."""
        for number, reader in enumerate(self._readers):
            reader.announce(ranges.get(number, ()))

    @property
    def head_bytes(self) -> int:
        """Bytes in memory for the heads of long files."""
        return sum(reader.head_bytes for reader in self._readers)

    def close(self) -> None:
        """Close the processor and the readers."""
        with contextlib.ExitStack() as ends:  # in reverse order; each one is closed even if another fails
            for reader in reversed(self._readers):
                ends.callback(reader.close)
            ends.callback(self._processor.close)

    def _fetch_and_process(
        self, refs: Sequence[SampleRef], targets: Sequence[Target], reads: Sequence[PlannedRead]
    ) -> list[ProcessedSample | HeadraceError]:
        with self._memory.admitted(sum(map(self._cost, refs, targets, reads))):
            fetch = self._fetch_all if self._files_of is None else self._fetch_files
            fetched = fetch(refs, targets, reads)
            with span("decode", clips=len(refs)):
                readable = [one for one in fetched if isinstance(one, FetchedSample)]
                processed = self._processor.process(readable)
            if len(readable) == len(refs):
                return processed
            results = iter(processed)
            return [next(results) if isinstance(one, FetchedSample) else one for one in fetched]

    def _cost(self, ref: SampleRef, target: Target, read: PlannedRead) -> int:
        if isinstance(target, FileTarget):
            return len(target.memory)
        return read.nbytes + self._processor.cost(ref.sample)

    def _fetch_all(
        self, refs: Sequence[SampleRef], targets: Sequence[Target], reads: Sequence[PlannedRead]
    ) -> list[FetchedSample | HeadraceError]:
        """Read the samples. Parts of the same sample share its bytes."""
        fetched = self._fetch_arrays(refs, targets, reads)
        slots_of = dict[tuple[int, int], list[int]]()
        for slot, ref in enumerate(refs):
            if slot not in fetched:
                slots_of.setdefault((ref.source, ref.sample.id), []).append(slot)
        for first, *other_slots in slots_of.values():
            needs = reads[first].needs
            if other_slots:
                needs = _union([needs, *(reads[slot].needs for slot in other_slots)])
            sample = fetched[first] = self._fetch(refs[first], targets[first], needs)
            for slot in other_slots:
                fetched[slot] = (
                    sample if isinstance(sample, HeadraceError) else _for_part(sample, refs[slot], targets[slot])
                )
        return [fetched[slot] for slot in range(len(refs))]

    def _fetch_arrays(
        self, refs: Sequence[SampleRef], targets: Sequence[Target], reads: Sequence[PlannedRead]
    ) -> dict[int, FetchedSample | HeadraceError]:
        """Read arrays directly into the batch. Returns the samples for which this was possible, by slot."""
        by_source = dict[int, list[tuple[int, ArrayTargets]]]()
        for slot, (ref, target) in enumerate(zip(refs, targets, strict=True)):
            if isinstance(target, ArrayTargets) and not self._quarantine.known_bad(ref):
                by_source.setdefault(ref.source, []).append((slot, target))
        fetched = dict[int, FetchedSample | HeadraceError]()
        for source, group in by_source.items():
            samples = [(refs[slot].sample, reads[slot].needs, target) for slot, target in group]
            for (slot, target), files in zip(group, self._readers[source].fetch_arrays(samples), strict=True):
                if files is not None:
                    fetched[slot] = FetchedSample(refs[slot], files, placed=target.places)
        return fetched

    def _fetch_files(
        self, refs: Sequence[SampleRef], targets: Sequence[Target], reads: Sequence[PlannedRead]
    ) -> list[FetchedSample | HeadraceError]:
        """Read files directly into the batch.

        All are read together up to the first damaged one, and one by one from there on.
        """
        by_source = dict[int, list[tuple[int, FileTarget]]]()
        for slot, (ref, target) in enumerate(zip(refs, targets, strict=True)):
            if isinstance(target, FileTarget) and not self._quarantine.known_bad(ref):
                by_source.setdefault(ref.source, []).append((slot, target))
        fetched: list[FetchedSample | HeadraceError | None] = [None] * len(refs)
        for source, group in by_source.items():
            count = self._readers[source].fetch_first([target for _, target in group])
            for slot, target in group[:count]:
                fetched[slot] = FetchedSample(refs[slot], {}, files=target.files)
        return [one or self._fetch(refs[slot], None, reads[slot].needs) for slot, one in enumerate(fetched)]

    def _fetch(self, ref: SampleRef, target: Target, needs: Needs) -> FetchedSample | HeadraceError:
        """Read and verify the bytes. Pieces of files that are read in part are verified when a decoder reads them."""
        check_cancelled()  # a read may take seconds
        if known_error := self._quarantine.known_bad(ref):
            return known_error
        try:
            return FetchedSample(ref, self._readers[ref.source].fetch(ref.sample, needs), _pixels(target))
        except CorruptionError as error:
            self._quarantine.mark_bad(ref, error)
            return error

    def _replace_or_skip(self, ref: SampleRef, target: Target, error: HeadraceError) -> ProcessedSample:
        if self._on_error == "replace" or not isinstance(error, DAMAGE):
            return self._substitute(ref, target, error)
        return ProcessedSample(ref.sample, {}, skipped=(self._describe_skipped(ref, error),))

    def _substitute(self, ref: SampleRef, target: Target, error: HeadraceError) -> ProcessedSample:
        """The first substitute that is not damaged."""
        skipped: list[SkippedSample] = []
        damaged, first_error = ref, error
        for attempt in range(MAX_SUBSTITUTES):
            if not isinstance(error, DAMAGE):
                raise error
            skipped.append(self._describe_skipped(damaged, error))
            substitute = self._plan.substitute(ref, attempt)
            if substitute is None:
                break
            damaged = substitute
            outcome = self._fetch_and_process(
                [substitute], [self._target_for(substitute, target)], self.plan([substitute]).reads
            )[0]
            if not isinstance(outcome, HeadraceError):
                return replace(outcome, skipped=tuple(skipped))
            error = outcome
        if (misnamed := misnamed_error(skipped)) is not None:
            raise misnamed from first_error
        raise CorruptionError(
            f"sample {ref.sample.key!r} is damaged ({first_error.message}), and so are all samples that could replace it",
            hint="check the dataset with `headrace verify`",
        ) from first_error

    def _target_for(self, ref: SampleRef, target: Target) -> Target:
        """The target of one sample, used for another sample. None if the other's files have a different length."""
        if self._files_of is None or not isinstance(target, FileTarget):
            return target
        files = self._files_of(ref.sample)
        return FileTarget(files, target.memory) if files.size == len(target.memory) else None

    def _describe_skipped(self, ref: SampleRef, error: HeadraceError) -> SkippedSample:
        sample, needs = ref.sample, self._processor.needs(ref)
        offsets = [member.offset for ext in needs for member in sample.members if member.ext == ext]
        return SkippedSample(
            id=sample.id,
            key=sample.key,
            shard=sample.shard,
            offset=offsets[0] if offsets else 0,
            code=error.code,
            reason=str(error),
            permanent=self._quarantine.known_bad(ref) is not None,
            dataset=self._plan.datasets[ref.source].url,
            source=ref.source,
        )


def _union(needs: Sequence[Needs]) -> Needs:
    """The files and pieces that several parts of one sample need.

    Whether a file is read in part is the same for all of them.
    """
    combined = dict(needs[0])
    for ext, runs in combined.items():
        if runs is not None:
            combined[ext] = union([pieces for one in needs if (pieces := one.get(ext)) is not None])
    return combined


def _for_part(fetched: FetchedSample, ref: SampleRef, target: Target) -> FetchedSample:
    return replace(fetched, ref=ref, target=_pixels(target))


def _pixels(target: Target) -> PixelTarget | None:
    """The target if a decoder can write pixels into it, else None."""
    return target if callable(target) else None
