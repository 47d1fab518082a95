"""`Loader`: what every loader does, whatever its batches hold: one epoch of batches per iteration, and one position.

Purpose: put plan, bytes, work and threads together, and remember where the trainer is.

Invariants: what the t-th global batch of an epoch holds depends on the plan and the stored bytes, never on the number
of ranks, threads or restarts. `state_dict` is true for the batch that the trainer received last, not for what was
prefetched. Threads start with the first batch and hold no reference to the loader: `close`, the end of a `with` block,
the loader's deletion and the end of the process all end them.
Failure behaviour: damaged samples are replaced and listed in `quarantine`; everything else that goes wrong is raised
where the batch would have been, and leaves the position before that batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from headrace.dataio.cache.objects import KnownSizes
from headrace.dataio.core import metrics
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.log import get_logger
from headrace.dataio.core.tracing import span
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.sidecar.client import LoaderMeter, open_reader
from headrace.loaders.batch.batch import Batch, Output
from headrace.loaders.batch.executor import BatchExecutor, Grouped
from headrace.loaders.batch.memory import BufferPool, MemoryBudget
from headrace.loaders.batch.prefetcher import Prefetcher, batches_from
from headrace.loaders.batch.sample_builder import OnError, SampleBuilder
from headrace.loaders.fetch.sample_reader import SampleReader
from headrace.loaders.interfaces import Processor
from headrace.loaders.partial.heads import HELD_BYTES
from headrace.loaders.quarantine import records
from headrace.loaders.quarantine.quarantine import Quarantine, skips_allowed
from headrace.loaders.quarantine.records import SkippedSample
from headrace.loaders.sampling import state as states
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.plan import OrderPlan
from headrace.loaders.validation import plain
from headrace.loaders.works.foreseen import Foreseen

if TYPE_CHECKING:  # what few loaders need, and the first batch does without, is imported where it is used
    from headrace.loaders.quarantine.shared_list import FollowedList, QuarantineList
    from headrace.loaders.sampling.force import Loss

DEFAULT_MEMORY = 4 * GIB

_log = get_logger(__name__)


class Delivery(msgspec.Struct, frozen=True):
    """How batches are made, which changes none of them: on what, by how many threads, how far ahead, through which daemon.

    `memory` bytes at most are in flight, `copy` gives every batch memory of its own. `grouped` says which slots of a
    batch are made together. `assumed`: that this is the only rank, since nobody said or could be asked.
    """

    output: Output
    threads: int
    prefetch: int = 2
    group: int = 1
    sidecar: str | os.PathLike[str] | None = "auto"
    memory: int = DEFAULT_MEMORY
    copy: bool = False
    grouped: Grouped | None = None
    assumed: bool = False


class Refusing(msgspec.Struct, frozen=True):
    """What becomes of damaged samples: replaced or left out, up to `limit` of them; and the list that is gone by, if any."""

    limit: float = 0.01
    on_bad: OnError = "replace"
    shared: str | os.PathLike[str] | QuarantineList | None = None


def _is_collated(caller: FrameType) -> bool:
    """Whether who iterates is what a DataLoader with a batch_size takes samples by, which has no better hook."""
    if caller.f_code.co_name != "fetch":
        return False  # a frame that is asked for its variables keeps them, such as a batch
    fetcher = caller.f_locals.get("self")
    return getattr(fetcher, "auto_collation", False) and getattr(fetcher, "collate_fn", None) is default_collate


def _count(batch: Batch) -> None:
    substituted = sum(1 for sample in batch.samples if sample and sample.refusals)
    for name, count in (("substituted", substituted), ("delivered", len(batch.samples) - substituted)):
        if count:
            metrics.loader_samples.labels(name).inc(count)


class Loader(IterableDataset[dict[str, Any]]):
    """Batches of a plan, made by `start_work()`. Public loaders derive from it and say only what theirs hold.

    `owned` datasets are closed with the loader.
    """

    def __init__(
        self,
        plan: OrderPlan,
        start_work: Callable[[], Processor],
        delivery: Delivery,
        refusing: Refusing,
        owned: Sequence[Dataset] = (),
    ) -> None:
        self._plan, self._start_work, self._delivery = plan, start_work, delivery
        folder = records.directory()
        self._on_bad, self._owned = refusing.on_bad, owned
        self._listed: FollowedList | None = None
        try:
            allowed = skips_allowed(refusing.limit, plan.samples)
            if refusing.shared is not None:
                from headrace.loaders.quarantine.shared_list import FollowedList

                self._listed = FollowedList.of(refusing.shared, plan)
        except BaseException:
            self._let_go()
            raise
        self._quarantine = Quarantine(
            allowed,
            lambda one: records.write(one, plan.datasets[one.source].version, folder),
            None if self._listed is None else self._listed.add,
        )
        self._epoch = self._batch = 0
        self._ahead: Prefetcher | None = None
        self._ending: Finalizer | None = None
        self._meter = LoaderMeter()
        self._closed = self._delivered = False

    def __len__(self) -> int:
        """Batches in the current epoch."""
        return self._plan.batches_in(self._epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches of the current epoch that are still to come. Whoever left an iteration after the last of them, or an
        evaluation anywhere, gets those of the next epoch; whoever loaded a state, those behind it."""
        if get_worker_info() is not None:
            raise UsageError(
                "a loader was copied into a DataLoader's worker, which would deliver every batch once more",
                hint="use num_workers=0: it decodes in threads of its own",
            )
        if _is_collated(sys._getframe(1)):
            raise UsageError(
                "a DataLoader with a batch_size would put batches together to batches of batches",
                hint="DataLoader(loader, batch_size=None): a loader gives whole batches, of its own batch_size",
            )
        if self._delivery.assumed and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                f"the loader was made before torch.distributed was initialised, as that of one rank; now there are "
                f"{dist.get_world_size()}, and each would read everything",
                hint="make it afterwards (with Accelerate after Accelerator(), with Lightning in train_dataloader()), "
                "or give it rank= and world_size=",
            )
        if self._delivered and self._batch:
            self._go_on()
        while (batch := self._next()) is not None:
            yield batch

    @property
    def dataset(self) -> Dataset:
        return self._plan.datasets[0]

    @property
    def order(self) -> Order:
        """The order, whose positions are parts (clips, windows) of samples."""
        return self._plan.order

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def quarantine(self) -> tuple[SkippedSample, ...]:
        """The samples that this loader refused, in the order in which their batches were delivered."""
        return self._quarantine.refusals

    @property
    def memory(self) -> dict[str, int]:
        """Bytes in flight now: `Prefetcher.in_flight`; zeros before the first batch."""
        if self._ahead is None:
            return {
                "limit": self._delivery.memory,
                "samples": 0,
                "samples_peak": 0,
                "waits": 0,
                "batches": 0,
                "heads": 0,
            }
        return self._ahead.in_flight

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer is: plain JSON types, equal on all ranks that received the same batches."""
        listed = None if self._listed is None else self._listed.state(self._epoch)
        position = states.Position(self._epoch, self._batch, self._quarantine.state(), listed)
        return states.dump(self._plan.fingerprint(self._epoch, self._batch), position)

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> Loss | None:
        """Go where `state` says, also in the middle of an iteration. Any world size will do, if the global batch is the same.

        Raises `MismatchError` naming the first field that differs, and changes nothing then. With `force` it goes on
        nevertheless, and returns and logs what is lost.
        """
        loss = None
        if force:
            from headrace.loaders.sampling.force import forced

            position, loss = forced(self._plan, *states.read(state))
        else:
            position = states.load(self._plan.fingerprint, state)
        batches = self._plan.batches_in(position.epoch)
        if position.batch > batches:
            raise UsageError(f"the loader's state is at batch {position.batch} of {batches}")
        other = None
        if self._listed is not None or position.listed is not None:
            from headrace.loaders.quarantine.shared_list import follow_state

            other = follow_state(self._listed, position)
        if other is not None:
            if loss is None:
                raise states.mismatch(other)
            loss = loss.also(other)
        if loss:
            _log.warning("a state that does not fit was forced: %s", loss)
        self._stop()
        self._epoch, self._batch, self._delivered = position.epoch, position.batch, False
        self._quarantine.load(position.quarantine)
        return loss

    def update_quarantine(self, version: int | None = None) -> int:
        """From the next batch on, go by this version of the `quarantine_list`, by default the newest; the version.

        An epoch takes over what the list has when it begins; this is for those who cannot wait. Every rank has to call it after
        the same batch with the same version.
        """
        if self._listed is None:
            raise UsageError("the loader goes by no list of bad samples", hint="give it quarantine_list=...")
        if (pinned := self._listed.list.pinned) is not None:
            raise UsageError(
                f"the loader goes by version {pinned} of its list for good", hint="open the list without one"
            )
        chosen = self._listed.list.newest() if version is None else plain("version", version, int)
        self._listed.go_by(self._epoch, chosen)
        self._stop()
        return chosen

    def close(self) -> None:
        """End the threads and let go of the dataset. Closing twice is allowed."""
        self._closed = True
        try:
            self._stop()
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_on(self) -> None:
        """To the next epoch, where an iteration was left that nobody wants the rest of."""
        left = self._batch < self._plan.batches_in(self._epoch)
        if left and not self._plan.schedule.evaluates:
            return
        if left:
            self._stop()
        self._epoch, self._batch = self._epoch + 1, 0

    def _next(self) -> dict[str, Any] | None:
        """The next batch, or None once at the end of every epoch."""
        self._check_open()
        if self._batch >= self._plan.batches_in(self._epoch):
            self._epoch, self._batch = self._epoch + 1, 0
            return None
        try:
            batch = self._wait()
            whole = batch.tensors() | self._plan.about(self._epoch, self._batch)
            _count(batch)
            if self._ahead is not None:
                self._ahead.plan()
        except BaseException as error:  # also Ctrl-C: the position stays, the threads end
            self._stop()
            if isinstance(error, Exception):  # it may be closed by another thread, or by a signal's handler
                self._check_open(error)
            raise
        self._batch, self._delivered = self._batch + 1, True
        return whole

    def _check_open(self, cause: Exception | None = None) -> None:
        if self._closed:
            hint = "make another one; its state_dict() says where to go on"
            raise UsageError("the loader is closed", hint=hint) from cause

    def _wait(self) -> Batch:
        self._meter.asked()
        try:
            with span("loader.wait", epoch=self._epoch, batch=self._batch):
                self._ahead = self._ahead or self._start()
                batch = self._ahead.next()
            refused = (refusal for sample in batch.samples if sample for refusal in sample.refusals)
            self._quarantine.deliver(refused, self._epoch)
        except BaseException:
            self._meter.got(0, steps=0)
            raise
        metrics.loader_wait_seconds.observe(self._meter.got(len(batch.samples)))
        return batch

    def _start(self) -> Prefetcher:
        with contextlib.ExitStack() as undo:  # what was begun ends, also if something further on cannot begin
            ahead = self._begin(undo)
            undo.pop_all()
        self._ending = Finalizer(self, ahead.close)
        return ahead

    def _begin(self, undo: contextlib.ExitStack) -> Prefetcher:
        how, plan = self._delivery, self._plan
        sources = list[SampleReader]()
        for dataset in plan.datasets:
            sized = KnownSizes(dataset.store, dataset.document.shard_sizes)
            reader = open_reader(sized, how.sidecar, self._meter)
            sources.append(SampleReader(reader, dataset.store, HELD_BYTES // len(plan.datasets)))
            undo.callback(sources[-1].close)
        work = Foreseen(self._start_work())
        undo.callback(work.close)
        memory = MemoryBudget(how.memory)
        maker = SampleBuilder(plan, work, sources, self._quarantine, memory, self._on_bad)
        output = how.output
        buffers = BufferPool(output.device, pinned=output.pinned, reuse=not how.copy, spare=how.prefetch + 3)
        prefetcher = BatchExecutor(maker.make, work.layout, output, how.threads, how.group, buffers, how.grouped)
        batches = batches_from(self._listed or plan, self._epoch, self._batch)
        return Prefetcher(batches, work, sources, prefetcher, how.prefetch, memory)

    def _let_go(self) -> None:
        for dataset in self._owned:
            dataset.close()
        if self._listed is not None:
            self._listed.close()

    def _stop(self) -> None:
        ending, self._ahead, self._ending = self._ending, None, None  # at once: it may fail, or be interrupted
        if ending is not None:
            ending()
