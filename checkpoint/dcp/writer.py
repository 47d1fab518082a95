"""`RepositoryWriter`, DCP's `StorageWriter` for the repository.

Order of a save:

1. Every rank sends its plan to the coordinator, with the parts that it holds.
2. The coordinator assigns replicated parts to ranks, balanced by bytes, and creates the attempt.
3. Each rank stores its part. The last rank commits the step.

Invariant: values other than tensors are rank-local. So are plain tensors below 64 KiB (generator states, positions).
DCP's own writers keep those of one rank only. Bytes are copied from the tensors into packs through a ring buffer of 64
MiB. A writer that another process unpickles saves on behalf of the process that sent it.

Failure behaviour: a rank that fails aborts the attempt, so the other ranks do not wait for it. No part of the step is
then visible. A step is never overwritten: a second save raises `ConflictError`. DCP raises all of these as
`CheckpointException`, with the original error in its `failures`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from headrace.checkpoint.dcp import document, session
from headrace.checkpoint.dcp.session import RankSave, Ticket, abort, save_rank
from headrace.checkpoint.format import group, names
from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format.chunking import SMALL_BELOW, Box, TensorSpec, banded
from headrace.checkpoint.format.codec import COMPRESSIONS
from headrace.checkpoint.format.metadata import Value
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.restoring import direct_for
from headrace.checkpoint.restoring.dcp_names import Path
from headrace.checkpoint.sharding import assign_writers, coverage_error
from headrace.checkpoint.state import tensors
from headrace.checkpoint.state.tensors import name_of
from headrace.dataio.core.errors import MismatchError, UnsupportedError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

Key = tuple[str, tuple[int, ...]]
"""Name and offset of a shard."""


@dataclasses.dataclass(frozen=True, slots=True)
class _HeldParts:
    """A rank's message to the coordinator. It lists the parts that the rank holds, with their sizes."""

    parts: tuple[tuple[Key, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Assignment:
    """The coordinator's message to a rank. `ticket` is an encoded `Ticket`, `plan` the plan digest of a large job."""

    ticket: bytes
    rank: int
    world_size: int
    plan: bytes


class RepositoryWriter(StorageWriter):
    """DCP's storage writer: saves one step of `run` in the repository at `url`.

    Args:
        url (str | Store): The repository, as for `Checkpointer`. For `async_save` in another process, give the URL, not
            an open store.
        run (str): The run's name.
        step (int | None): The step's number. DCP's `checkpoint_id`, if given, replaces it. Default: None.
        compression (str): "none", "zstd", "auto" or "delta", as for `Checkpointer`. Default: "none".
        gds (bool): Use GPUDirect Storage, as for `Checkpointer`. Default: False.
        timeout (float): The time limit for the other ranks, in seconds. Default: 600.
        overwrite (bool): If this job has already saved the step, save it again, in a branch that begins before it.
            Otherwise this raises `ConflictError`. Default: False.
        metadata (Mapping[str, int | float | bool | str | None] | None): Values that describe the step, as for
            `Checkpointer.save`. Those of rank 0 are stored. Set the attribute `metadata` if one writer saves several steps.
            Default: None, no metadata.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Raises:
        UsageError: An argument is invalid.

    Example:
        >>> import tempfile, torch, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> folder, state = tempfile.mkdtemp(), {"weight": torch.ones(2)}
        >>> _ = dcp.save(state, storage_writer=RepositoryWriter(folder, run="exp42", step=1), no_dist=True)
    """

    def __init__(
        self,
        url: str | Store,
        *,
        run: str,
        step: int | None = None,
        compression: str = "none",
        gds: bool | Direct = False,
        timeout: float = 600.0,
        overwrite: bool = False,
        metadata: Mapping[str, Value] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise UsageError(f"unknown compression {compression!r}", hint=f"use one of: {', '.join(COMPRESSIONS)}")
        self._url, self._options, self._run = url, dict(storage_options or {}), names.check_run(run)
        self._step = None if step is None else names.check_step(step)
        self._compression, self._timeout, self._gds = compression, timeout, gds
        self._overwrite = overwrite
        self.metadata = metadata
        self._own_items: list[WriteItem] = []
        self._paths: dict[str, Path] | None = None

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The metadata of the next step; `UsageError` if it is set to values that cannot be stored."""
        return self._metadata

    @metadata.setter
    def metadata(self, values: Mapping[str, Value] | None) -> None:
        self._metadata = step_metadata.check(values)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=None if self._step is None else str(self._step))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a step alone does not name a repository, so DCP cannot choose this writer by it

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "without collectives, DCP saves a separate checkpoint for each rank", hint="leave use_collectives=True"
            )
        if self._step is None:
            raise UsageError("no step is given", hint="RepositoryWriter(url, run=..., step=...), or checkpoint_id=step")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Separate the rank-local items, and list the shared parts that this rank holds."""
        if not plan.usable:
            raise _caching_error()
        self._paths = plan.planner_data
        self._own_items = [item for item in plan.items if _is_own(item)]
        shared = [item for item in plan.items if not _is_own(item)]
        parts = _HeldParts(tuple((_key(item), _nbytes(item)) for item in shared))
        return dataclasses.replace(plan, items=shared, storage_data=parts)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, assign parts to ranks and create the attempt."""
        assert self._step is not None
        with self._store() as store:
            ticket = msgspec.msgpack.encode(session.new_ticket(store, self._run, self._step, self._overwrite))
        shares = _assign_parts(plans)
        digest = _plan_digest(shares) if names.is_grouped(len(plans)) else b""
        return [
            dataclasses.replace(plan, items=items, storage_data=_Assignment(ticket, rank, len(plans), digest))
            for rank, (plan, items) in enumerate(zip(plans, shares, strict=True))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's part. Returns after all ranks have committed the step."""
        if getattr(planner, "_enable_plan_caching", False):
            raise _caching_error()
        assignment: _Assignment = plan.storage_data
        with self._store() as store:
            share = self._share(assignment)
            try:
                tensors, specs, tree = self._tensors_and_tree(plan.items, planner)
            except BaseException as error:
                abort(store, share, error)
                raise
            save_rank(store, share, tensors, specs, tree, direct_for(store, self._gds))
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing. A rank committed the step in `write_data`, after all ranks had stored their manifests."""

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._url, Store):
            raise UsageError("an open store cannot be sent to another process", hint="give RepositoryWriter the URL")
        return self.__dict__ | {"_session": session.export_session()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        session.adopt_session(state.pop("_session"))
        self.__dict__.update(state)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        if isinstance(self._url, Store):
            yield self._url
            return
        with open_store(self._url, storage_options=self._options) as store:
            yield store

    def _tensors_and_tree(
        self, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[list[torch.Tensor], list[TensorSpec], bytes]:
        own_tensors = [item for item in self._own_items if item.type != WriteItemType.BYTE_IO]
        tensors = [_tensor(planner, item) for item in [*items, *own_tensors]]
        specs = [_spec(item, True) for item in items] + [_spec(item, False) for item in own_tensors]
        values = {
            item.index.fqn: _value(planner, item) for item in self._own_items if item.type == WriteItemType.BYTE_IO
        }
        tree, inside = document.encode(sorted({i.index.fqn for i in [*items, *own_tensors]}), values, self._paths)
        tensors += [leaf.local.tensor for leaf in inside]
        specs += [TensorSpec(leaf.name, leaf.local.dtype, leaf.local.box, False) for leaf in inside]
        return tensors, specs, tree

    def _share(self, assignment: _Assignment) -> RankSave:
        assert self._step is not None
        ticket = msgspec.msgpack.decode(assignment.ticket, type=Ticket)
        return RankSave(
            self._run,
            self._step,
            ticket,
            assignment.rank,
            assignment.world_size,
            self._compression,
            self._timeout,
            assignment.plan,
            self._metadata,
        )


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that DCP's `checkpoint_id` names. It is a number, or a path that ends in a number (step-1200)."""
    match = re.search(
        r"(\d+)/?$", os.fspath(checkpoint_id) if not isinstance(checkpoint_id, int) else str(checkpoint_id)
    )
    if match is None:
        raise UsageError(
            f"checkpoint_id {str(checkpoint_id)!r:.100} names no step", hint="end it with the step's number"
        )
    return names.check_step(int(match[1]))


def _assign_parts(plans: list[SavePlan]) -> list[list[WriteItem]]:
    """Assign every part to one of the ranks that hold it, balanced by bytes.

    If a planner does not report these ranks, keep the planner's assignment.
    """
    items = {_key(item): item for local in plans for item in local.items}
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    for rank, local in enumerate(plans):
        for key, nbytes in local.storage_data.parts if isinstance(local.storage_data, _HeldParts) else ():
            holders.setdefault(key, []).append(rank)
            sizes[key] = nbytes
    if any(key not in holders for key in items):
        return [local.items for local in plans]
    texts = {repr(key): key for key in items}
    writers = assign_writers((text, sizes[key], holders[key]) for text, key in texts.items())
    shares: list[list[WriteItem]] = [[] for _ in plans]
    for text, key in texts.items():
        shares[writers[text]].append(items[key])
    return shares


def _plan_digest(shares: Sequence[Sequence[WriteItem]]) -> bytes:
    """The plan digest of these shares, by rank. Raises `MismatchError` if they do not cover a tensor exactly."""
    boxes: dict[str, list[Box]] = {}
    digests = []
    for share in shares:
        specs = banded(_spec(item, True) for item in share)
        for spec in specs:
            boxes.setdefault(spec.name, []).append(spec.box)
        digests.append(group.share_digest(specs))
    for name, parts in boxes.items():
        if problem := coverage_error(parts):
            raise MismatchError(f"tensor {name!r:.200}: {problem}", hint="nothing was saved; check the planner")
    return group.plan_digest(digests)


def _is_own(item: WriteItem) -> bool:
    if item.type == WriteItemType.BYTE_IO:
        return True
    return item.type == WriteItemType.TENSOR and _nbytes(item) < SMALL_BELOW


def _key(item: WriteItem) -> Key:
    return item.index.fqn, tuple(item.index.offset or ())


def _nbytes(item: WriteItem) -> int:
    """The size of the part, not of the whole tensor."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _spec(item: WriteItem, shared: bool) -> TensorSpec:
    data = item.tensor_data
    assert data is not None
    box = Box(tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return TensorSpec(item.index.fqn, name_of(data.properties.dtype), box, shared)


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    tensor: torch.Tensor = tensors.describe(data.detach(), item.index.fqn).tensor
    return tensor


def _value(planner: SavePlanner, item: WriteItem) -> object:
    lookup: Any = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise UnsupportedError(
            f"{type(planner).__name__} gives values other than tensors as pickles only",
            hint="derive the planner from DefaultSavePlanner",
        )
    return lookup(item.index)


def _caching_error() -> UnsupportedError:
    return UnsupportedError(
        "the planner's plan caching hides new saves from the storage", hint="leave enable_plan_caching=False"
    )
