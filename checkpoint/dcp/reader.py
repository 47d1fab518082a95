"""`RepositoryReader`, DCP's `StorageReader` for the repository. It loads steps that DCP or a `Checkpointer` saved.

Invariant: every byte of a loaded tensor is checked against its chunk's digest. Only chunks that hold a requested
element are read. Other values are decoded from msgpack. DCP's planner expects pickles of them, so the reader creates
these pickles itself, in memory.

Failure behaviour: `MissingStepError`, which is a `FileNotFoundError`. `CorruptionError` names step, tensor, pack and
offset. DCP reports an error in `read_metadata` as an `AssertionError`, with the original error in its text. It reports
any other error as a `CheckpointException`, with the original error in its `failures`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from headrace.checkpoint.dcp import document, session
from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Box, whole
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.restoring import GdsStore, direct_for
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.aliases import Target, require_one_content
from headrace.checkpoint.restoring.chunk_reader import Saved, Want
from headrace.checkpoint.restoring.dcp_names import Names, all_tensors
from headrace.checkpoint.state.build import Builder, Fit
from headrace.checkpoint.state.tensors import TensorSink, synchronize
from headrace.checkpoint.state.tree import tensor_names
from headrace.dataio.core.errors import CorruptionError, MismatchError, TransientError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store


class RepositoryReader(StorageReader):
    """DCP's storage reader: loads one step of `run` from the repository at `url`.

    All ranks load the step that DCP's coordinator found. A load does not affect later saves, unless `resume` is given.

    Args:
        url (str | Store): The repository, as for `Checkpointer`.
        run (str): The run's name.
        step (int | str): A step's number, or "latest". DCP's `checkpoint_id`, if given, replaces it. Default: "latest".
        tag (str | None): The tag of a step, instead of `step`. Default: None.
        rank (int | None): The rank whose values other than tensors are loaded. Default: None, this process's rank in
            the process group of `dcp.load`.
        resume (bool): The process continues training from this step. If a later save is of a step that is not newer
            than the run's newest step, it then begins a branch. Default: False.
        gds (bool): Use GPUDirect Storage, as for `Checkpointer`. Default: False.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Raises:
        UsageError: An argument is invalid.

    Example:
        >>> import tempfile, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from headrace.checkpoint.dcp import RepositoryWriter
        >>> folder, state = tempfile.mkdtemp(), {"weight": torch.ones(2)}
        >>> _ = dcp.save(state, storage_writer=RepositoryWriter(folder, run="exp42", step=1), no_dist=True)
        >>> loaded = {"weight": torch.zeros(2)}
        >>> dcp.load(loaded, storage_reader=RepositoryReader(folder, run="exp42"), no_dist=True)
        >>> loaded["weight"]
        tensor([1., 1.])
    """

    def __init__(
        self,
        url: str | Store,
        *,
        run: str,
        step: int | str = "latest",
        tag: str | None = None,
        rank: int | None = None,
        resume: bool = False,
        gds: bool | Direct = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._url, self._options, self._run = url, dict(storage_options or {}), names.check_run(run)
        self._step: int | str = repository.step_or_tag(step, tag)
        self._given_rank, self._resume, self._gds = rank, resume, gds
        self._open = contextlib.ExitStack()
        self._names = Names()
        self._saved: dict[str, Saved] = {}

    @property
    def step(self) -> int | str:
        """The requested step. After `read_metadata`, the number of the step that was found."""
        return self._step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._open.close()
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a step alone does not name a repository, so DCP cannot choose this reader by it

    # Not named "kwargs": DCP would then request a failed rank's own metadata, and the other ranks would wait.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The step's contents as this rank sees them. The step is leased until `read_data` returns."""
        self._open.close()
        self._is_latest = self._step == "latest"
        with contextlib.ExitStack() as stack:
            base = self._find(stack)
            self._opened_step = stack.enter_context(chunk_reader.LeasedStep(self._store, self._run, base))
            self._step, self._base = base.step, base
            self._select_rank(Ranks.from_environment(None, None).rank if self._given_rank is None else self._given_rank)
            metadata = self._metadata()
            self._open = stack.pop_all()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Replace `metadata` in place by that of the rank in DCP's process group. DCP passes the rank only here."""
        rank = kwargs.get("rank")
        if rank is not None and self._given_rank is None and rank != self._rank:
            self._select_rank(rank)
            metadata.state_dict_metadata.clear()
            metadata.state_dict_metadata.update(self._metadata().state_dict_metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator, send every rank the step to load, because "latest" may differ between ranks."""
        if len(plans) == 1 and self._given_rank is None:
            self._see_alone()
        return [dataclasses.replace(plan, storage_data=self._base) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the requested tensors and values."""
        try:
            if isinstance(plan.storage_data, Base) and plan.storage_data != self._base:
                self._go_over_to(plan.storage_data)
            items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
            targets = [planner.resolve_tensor(item).detach() for item in items]
            with torch.no_grad():
                wants = [self._want(item, target) for item, target in zip(items, targets, strict=True)]
                read_items = zip(items, wants, targets, strict=True)
                places = [
                    Target(item.dest_index.fqn, want.saved, want.box, target) for item, want, target in read_items
                ]
                require_one_content(self._store, self._opened_step, places)
                direct = direct_for(self._store, self._gds)
                store = self._store if direct is None else GdsStore(self._store, direct)
                synchronize(target.device for target in targets)
                chunk_reader.read(store, self._opened_step, wants)
            for item, target in zip(items, targets, strict=True):
                planner.commit_tensor(item, target)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _pickled_here(self._value(item.storage_index.fqn)))
            if self._resume:
                session.resume(self._store, self._run, self._base, latest=self._is_latest)
        finally:
            self._open.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _opened(self) -> contextlib.AbstractContextManager[Store]:
        return open_store(str(self._url), storage_options=self._options)

    def _select_rank(self, rank: int) -> None:
        """Set the names and tensors of the step as this rank sees it."""
        self._rank = rank
        self._names = document.names_of(self._opened_step, rank)
        self._saved = all_tensors(self._opened_step, rank)

    def _see_alone(self) -> None:
        """Use the job's rank, if as many ranks saved the step. With `no_dist=True`, every process is DCP's rank 0."""
        job = Ranks.from_environment(None, None)
        if job.rank == self._rank or len(self._opened_step.manifests) != job.world_size:
            return
        planned = self._metadata().state_dict_metadata
        self._select_rank(job.rank)
        if self._metadata().state_dict_metadata != planned:
            raise UsageError("ranks hold other tensors under the same names", hint="RepositoryReader(..., rank=)")

    def _go_over_to(self, base: Base) -> None:
        """Switch to the coordinator's step, which differs from the step that this rank planned with."""
        planned = self._metadata().state_dict_metadata
        self._open.close()
        with contextlib.ExitStack() as stack:
            if not isinstance(self._url, Store):
                self._store = stack.enter_context(self._opened())
            self._opened_step = stack.enter_context(chunk_reader.LeasedStep(self._store, self._run, base))
            self._step, self._base = base.step, base
            self._select_rank(self._rank)
            self._open = stack.pop_all()
        if self._metadata().state_dict_metadata != planned:
            raise TransientError(
                f"run {self._run} got step {base.step}, of another structure, while it was loaded", hint="load it again"
            )

    def _find(self, stack: contextlib.ExitStack) -> Base:
        """Open the store and find the step."""
        self._store = self._url if isinstance(self._url, Store) else stack.enter_context(self._opened())
        base = repository.find(self._store, self._run, self._step)
        if base is None:
            raise repository.missing(self._store, self._run)
        return base

    def _value(self, name: str) -> object:
        """Decode a value other than a tensor. Tensors inside it are read."""
        plan, node = Fit(), self._names.values[name]
        inside = {n: (self._saved[n].dtype, self._saved[n].shape) for n in tensor_names(node) if n in self._saved}
        value = Builder(inside, plan).value(node, name)
        if plan.problems:
            raise MismatchError("; ".join(plan.problems))
        wants = [Want(self._saved[n], whole(self._saved[n].shape), TensorSink(tensor)) for n, tensor in plan.fresh]
        if wants:
            chunk_reader.read(self._store, self._opened_step, wants)
        return value

    def _metadata(self) -> Metadata:
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self._names.values}
        for name, tensor in self._names.tensors.items():
            if tensor not in self._saved:
                raise CorruptionError(f"the checkpoint refers to tensor {tensor!r:.200}, which it does not hold")
            entries[name] = _tensor_metadata(self._saved[tensor])
        return Metadata(entries, dict(self._names.paths), storage_meta=StorageMeta(checkpoint_id=str(self._step)))

    def _want(self, item: ReadItem, target: torch.Tensor) -> Want:
        saved = self._saved[self._names.tensors[item.storage_index.fqn]]
        box = Box(saved.shape, tuple(item.storage_offsets), tuple(item.lengths))
        return Want(saved, box, TensorSink(target, getattr(torch, saved.dtype)))


def _tensor_metadata(saved: Saved) -> TensorStorageMetadata:
    """Metadata of the whole tensor as one chunk. The reader finds the shards itself, so DCP does not plan them."""
    size = torch.Size(saved.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, saved.dtype)), size, [chunk])


def _pickled_here(value: object) -> io.BytesIO:
    """The decoded value as a pickle, because DCP's planner expects one."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
