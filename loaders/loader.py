"""`BaseLoader`, the base class of all loaders: each iteration yields one epoch, and a state holds the position.

Purpose: connect the plan, the readers, the processor and the threads, and track the trainer's position.

Invariants:
- The content of the t-th global batch of an epoch depends on the plan and the stored bytes, never on the number of
  ranks, threads or restarts.
- `state_dict` describes the last batch that the trainer received. Prefetched batches do not count.
- Threads start with the first batch and hold no reference to the loader. They end when the loader is closed or deleted,
  at the end of a `with` block, and when the process ends.

Failure behaviour: damaged samples are skipped and listed in `quarantine`. Any other error is raised in place of the
batch, and the position stays before that batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec
from msgspec.structs import replace
from torch.utils.data import IterableDataset

from headrace.dataio.cache.objects import KnownSizes
from headrace.dataio.core import metrics
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.log import get_logger, is_first
from headrace.dataio.core.tracing import span
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import Sample
from headrace.dataio.sidecar.client import LoaderMeter, open_shard_reader
from headrace.loaders.batch.batch import Batch, Output
from headrace.loaders.batch.memory import BufferPool, MemoryBudget
from headrace.loaders.batch.prefetcher import BatchExecutor, GroupSlots, Prefetcher, batches_from
from headrace.loaders.batch.sample_builder import OnError, SampleBuilder
from headrace.loaders.callers import check_caller, check_world, missing_attribute, refuse_copy
from headrace.loaders.fetch.partial_file import HEAD_CACHE_BYTES
from headrace.loaders.fetch.sample_reader import SampleReader
from headrace.loaders.interfaces import Processor
from headrace.loaders.quarantine import records
from headrace.loaders.quarantine.quarantine import Quarantine, skips_allowed
from headrace.loaders.quarantine.records import SkippedSample
from headrace.loaders.sampling import state as states
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.plan import OrderPlan
from headrace.loaders.validation import check_count, checked

if TYPE_CHECKING:  # few loaders need these, so they are imported where they are used
    from headrace.loaders.quarantine.shared_list import FollowedList, QuarantineList
    from headrace.loaders.sampling.force import Loss

DEFAULT_MEMORY = 4 * GIB
MAX_RANKS = 1 << 20

_log = get_logger(__name__)


class DeliveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How batches are built and delivered. None of these options changes their content.

    Args:
        output: device, dtype and axes of the batches.
        num_threads: number of threads that build batches.
        prefetch_batches: number of batches prepared in advance.
        group: number of samples that are built together.
        group_slots: decides which slots of a batch are built together.
        sidecar: "auto", the path of a socket, or None.
        memory_limit: limit in bytes on the samples in processing, and separately on the batches in preparation.
        copy: allocate new memory for every batch.
        alone_by_default: True if neither the caller nor torch.distributed gave a rank, so this is the only one.
    """

    output: Output
    num_threads: int
    prefetch_batches: int = 2
    group: int = 1
    group_slots: GroupSlots | None = None
    sidecar: str | os.PathLike[str] | None = "auto"
    memory_limit: int = DEFAULT_MEMORY
    copy: bool = False
    alone_by_default: bool = False


class BadSampleOptions(msgspec.Struct, frozen=True):
    """How damaged samples are handled. The arguments are those of `LoaderConfig`."""

    max_bad_samples: float = 0.01
    on_error: OnError = "replace"
    quarantine_list: str | os.PathLike[str] | QuarantineList | None = None


def _count(batch: Batch) -> None:
    substituted = len([sample for sample in batch.samples if sample and sample.skipped])
    for name, count in (("substituted", substituted), ("delivered", len(batch.samples) - substituted)):
        if count:
            metrics.loader_samples.labels(name).inc(count)


class StepSamples(msgspec.Struct, frozen=True):
    """The samples of one step.

    Args:
        step: number of the step, from 0.
        epoch: its epoch.
        batch: number of the global batch in its epoch.
        ranks: the samples of each rank.
    """

    step: int
    epoch: int
    batch: int
    ranks: list[list[Sample]]


class BaseLoader(IterableDataset[dict[str, Any]]):
    """Batches of a plan. The public loaders derive from this class.

    Args:
        plan: names the samples of each batch.
        start_processor: creates the processor when the first batch is requested.
        delivery: how batches are built.
        bad_samples: how damaged samples are handled.
        owned: datasets that the loader closes when it is closed.
    """

    def __init__(
        self,
        plan: OrderPlan,
        start_processor: Callable[[], Processor],
        *,
        delivery: DeliveryOptions,
        bad_samples: BadSampleOptions,
        owned: Sequence[Dataset] = (),
    ) -> None:
        self._plan, self._start_processor, self._delivery = plan, start_processor, delivery
        folder = records.directory()
        self._on_error, self._owned = bad_samples.on_error, owned
        self._listed: FollowedList | None = None
        try:
            allowed = skips_allowed(bad_samples.max_bad_samples, plan.samples)
            if bad_samples.quarantine_list is not None:
                from headrace.loaders.quarantine.shared_list import FollowedList

                self._listed = FollowedList.of(bad_samples.quarantine_list, plan)
        except BaseException:
            self._close_datasets()
            raise
        self._quarantine = Quarantine(
            allowed,
            lambda one: records.write(one, plan.datasets[one.source].version, folder),
            None if self._listed is None else self._listed.add,
        )
        self._epoch = self._batch = 0
        self._prefetcher: Prefetcher | None = None
        self._finalizer: Finalizer | None = None
        self._meter = LoaderMeter()
        self._closed = self._delivered = False

    def __len__(self) -> int:
        """Number of batches in the current epoch."""
        return self._plan.batches_in(self._epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the remaining batches of the current epoch.

        If the previous iteration was left after the last batch of an epoch, the next epoch is yielded instead. The same
        holds if an evaluation was left after any batch. After `load_state_dict`, the batches that follow the state are
        yielded.
        """
        at_start = not (self._epoch or self._batch or self._delivered)
        check_caller(sys._getframe(1), at_start=at_start)
        check_world(self._delivery.alone_by_default)
        if self._delivered and self._batch:
            self._next_epoch()
        while (batch := self._next()) is not None:
            yield batch

    def __reduce__(self) -> NoReturn:
        refuse_copy()

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_attribute(type(self).__name__, name)

    @property
    def dataset(self) -> Dataset:
        """The dataset; with a mixture, the first one."""
        return self._plan.datasets[0]

    @property
    def order(self) -> Order:
        """The order of the samples' parts (clips, windows)."""
        return self._plan.order

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def quarantine(self) -> tuple[SkippedSample, ...]:
        """The samples that this loader skipped, in the order in which their batches were delivered."""
        return self._quarantine.skipped

    @property
    def memory(self) -> dict[str, int]:
        """Bytes in use by samples and batches in preparation (`Prefetcher.in_flight`); zeros before the first batch."""
        if self._prefetcher is None:
            return {
                "limit": self._delivery.memory_limit,
                "samples": 0,
                "samples_peak": 0,
                "waits": 0,
                "batches": 0,
                "heads": 0,
            }
        return self._prefetcher.in_flight

    def state_dict(self) -> dict[str, Any]:
        """The trainer's position, as plain JSON types. It is equal on all ranks that received the same batches."""
        listed = None if self._listed is None else self._listed.state(self._epoch)
        position = states.Position(self._epoch, self._batch, quarantine=self._quarantine.state(), listed=listed)
        return states.dump(self._plan.fingerprint(self._epoch, self._batch), position)

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise the error of `load_state_dict(state)`, if it would raise one; change nothing."""
        self._position_of(state, force=False)

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> Loss | None:
        """Go to the position of `state`, also during an iteration. The world size may differ; the global batch may not.

        Args:
            state: what `state_dict` returned.
            force: load a state that does not match this loader.

        Returns:
            With `force`, a `Loss`, which is false if nothing is lost; a loss is also logged. Without `force`, None.

        Raises:
            MismatchError: the state does not match. The error names the first field that differs, and the loader is
                unchanged.
            UsageError: `state` is not the state of a loader.
        """
        position, loss, follows = self._position_of(state, force)
        if self._listed is not None and follows:
            self._listed.follow_position(position)
        if loss and is_first("job"):
            _log.warning("a state that does not fit was forced: %s", loss)
        self._stop()
        self._epoch, self._batch, self._delivered = position.epoch, position.batch, False
        self._quarantine.load(position.quarantine)
        return loss

    def _position_of(self, state: Mapping[str, Any], force: bool) -> tuple[states.Position, Loss | None, bool]:
        """The position in `state`, the loss if it is forced, and whether to follow the list that the state names."""
        loss = difference = None
        if force:
            from headrace.loaders.sampling.force import forced

            position, loss = forced(self._plan, *states.read(state))
        else:
            position = states.load(self._plan.fingerprint, state)
        batches = self._plan.batches_in(position.epoch)
        if position.batch > batches:
            raise UsageError(f"the loader's state is at batch {position.batch} of {batches}")
        if self._listed is not None or position.listed is not None:
            from headrace.loaders.quarantine.shared_list import difference_of

            difference = difference_of(self._listed, position)
        if difference is not None:
            if loss is None:
                raise states.mismatch(difference)
            loss = loss.also(difference)
        return position, loss, difference is None

    def update_quarantine(self, version: int | None = None) -> int:
        """Follow this version of the `quarantine_list` from the next batch on.

        Without this call, an epoch follows the version that was the newest when the epoch began. Every rank must make
        this call after the same batch, with the same version.

        Args:
            version: version of the list. Default: the newest.

        Returns:
            The version.
        """
        if self._listed is None:
            raise UsageError("the loader follows no list of bad samples", hint="give it quarantine_list=...")
        if (pinned := self._listed.list.pinned) is not None:
            raise UsageError(
                f"the loader follows version {pinned} of its list only", hint="open the list without a version"
            )
        chosen = self._listed.list.newest() if version is None else checked("version", version, int)
        self._listed.follow(self._epoch, chosen)
        self._stop()
        return chosen

    def samples_of_steps(self, steps: range, world_size: int = 1) -> Iterator[StepSamples]:
        """Yield the samples of these steps. Only the index is read, and the position of the loader does not change.

        A step is a global batch; steps are counted from the first batch of epoch 0. Substitutes of damaged samples are
        not listed (see `quarantine`).

        Args:
            steps: numbers of the steps, ascending.
            world_size: number of ranks that share each batch.

        Raises:
            UsageError: `steps` is not an ascending range, or `world_size` is not positive.
        """
        if steps.step != 1 or steps.start < 0:
            raise UsageError(f"{steps} is not a range of steps", hint="such as range(100, 200)")
        world_size = check_count("world_size", world_size, MAX_RANKS)
        epoch = first = 0
        for step in steps:
            while step - first >= self._plan.batches_in(epoch):
                first += self._plan.batches_in(epoch)
                epoch += 1
            number = step - first
            plan = self._plan.of(epoch)
            ranks = [replace(plan, rank=rank, world_size=world_size) for rank in range(world_size)]
            shares = [rank.refs(epoch, range(number, number + 1))[0] for rank in ranks]
            yield StepSamples(step, epoch, number, [[ref.sample for ref in share] for share in shares])

    def close(self) -> None:
        """End the threads, and close the datasets that the loader opened. Further calls do nothing."""
        self._closed = True
        try:
            self._stop()
        finally:
            self._close_datasets()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_epoch(self) -> None:
        """Go to the next epoch if the last iteration was left, unless its remaining batches must still be delivered."""
        unfinished = self._batch < self._plan.batches_in(self._epoch)
        if unfinished and not self._plan.schedule.evaluates:
            return
        if unfinished:
            self._stop()
        self._epoch, self._batch = self._epoch + 1, 0

    def _next(self) -> dict[str, Any] | None:
        """The next batch, or None at the end of an epoch."""
        self._check_open()
        if self._batch >= self._plan.batches_in(self._epoch):
            self._epoch, self._batch = self._epoch + 1, 0
            return None
        try:
            batch = self._wait()
            tensors = batch.tensors() | self._plan.about(self._epoch, self._batch)
            _count(batch)
            if self._prefetcher is not None:
                self._prefetcher.plan()
        except BaseException as error:  # also on Ctrl-C: the position stays, and the threads end
            self._stop()
            if isinstance(error, Exception):  # another thread, or a signal handler, may have closed the loader
                self._check_open(error)
            raise
        self._batch, self._delivered = self._batch + 1, True
        return tensors

    def _check_open(self, cause: Exception | None = None) -> None:
        if self._closed:
            hint = "make another loader; load this one's state_dict() to continue"
            raise UsageError("the loader is closed", hint=hint) from cause

    def _wait(self) -> Batch:
        self._meter.asked()
        try:
            with span("loader.wait", epoch=self._epoch, batch=self._batch):
                self._prefetcher = self._prefetcher or self._start()
                batch = self._prefetcher.next()
            skipped = [one for sample in batch.samples if sample for one in sample.skipped]
            has_samples = any(sample is not None and sample.tensors for sample in batch.samples)
            self._quarantine.deliver(skipped, self._epoch, has_samples=has_samples)
        except BaseException:
            self._meter.got(0, steps=0)
            raise
        metrics.loader_wait_seconds.observe(self._meter.got(len(batch.samples)))
        return batch

    def _start(self) -> Prefetcher:
        with contextlib.ExitStack() as undo:  # if one part fails to start, close the parts that were started
            prefetcher = self._build(undo)
            undo.pop_all()
        self._finalizer = Finalizer(self, prefetcher.close)
        return prefetcher

    def _build(self, undo: contextlib.ExitStack) -> Prefetcher:
        delivery, plan = self._delivery, self._plan
        readers = list[SampleReader]()
        for dataset in plan.datasets:
            sized = KnownSizes(dataset.store, dataset.document.shard_sizes)
            reader = open_shard_reader(sized, delivery.sidecar, self._meter)
            readers.append(SampleReader(reader, dataset.store, HEAD_CACHE_BYTES // len(plan.datasets)))
            undo.callback(readers[-1].close)
        processor = self._start_processor()
        undo.callback(processor.close)
        memory, output = MemoryBudget(delivery.memory_limit), delivery.output
        builder = SampleBuilder(
            plan, processor, readers, quarantine=self._quarantine, memory=memory, on_error=self._on_error
        )
        spare = (delivery.prefetch_batches + 3) * len(processor.layout.tensors)  # each tensor has its own block
        buffers = BufferPool(output.device, pinned=output.pinned, reuse=not delivery.copy, spare=spare)
        executor = BatchExecutor(
            builder.build,
            layout=processor.layout,
            output=output,
            num_threads=delivery.num_threads,
            group=delivery.group,
            group_slots=delivery.group_slots,
            buffers=buffers,
        )
        batches = batches_from(self._listed or plan, self._epoch, self._batch)
        return Prefetcher(batches, builder, executor, ahead=delivery.prefetch_batches, memory=memory)

    def _close_datasets(self) -> None:
        for dataset in self._owned:
            dataset.close()
        if self._listed is not None:
            self._listed.close()

    def _stop(self) -> None:
        finalizer, self._prefetcher, self._finalizer = (
            self._finalizer,
            None,
            None,
        )  # cleared first, since closing may fail
        if finalizer is not None:
            finalizer()
