"""Megatron-Core: strategies for `dist_checkpointing.save` and `load` that keep sharded states in the repository.

    dist_checkpointing.save(state, folder, RepositorySave(url, run=...))
    dist_checkpointing.load(state, folder, RepositoryLoad(url, run=...))

The sharded tensors and objects of the state are stored as a step of the repository. Its number is the number at the end
of the folder's name (`iter_0001200`). Megatron-Core writes the rest into the folder, as `common.pt` and
`metadata.json`. It allows no other files there. Both strategies work inside Megatron-Core's classes for parallel saving
and loading. Parallel loading communicates through CUDA.

A save returns after the commit. `save(..., async_sharded_save=True)` returns after a copy into main memory. The next
save reuses this memory. A thread of this process saves the copy, and uses its own process group. The process that
Megatron-Core then starts only waits for that thread. So Megatron-Core's queue sees the save in flight, and its
finalization raises any error.

Invariant: each replica is written once, by the rank that Megatron-Core chooses (`replica_id`). Objects are stored as
plain values, arrays and bytes, never as pickles. A job can load with any number of ranks and any sharding.

Failure behaviour: as `headrace.checkpoint.dcp`. `UsageError` names an object that cannot be saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format.metadata import Value
from headrace.checkpoint.frameworks.plain import packed, unpacked
from headrace.checkpoint.peers import PeerProbe, wait_closed
from headrace.dataio.core.errors import UnsupportedError

BACKEND = "headrace"


class RepositorySave(AsyncSaveShardedStrategy):  # type: ignore[misc, unused-ignore]
    """A save strategy: `dist_checkpointing.save(state, folder, RepositorySave(url, run=...))`.

    Args:
        url (str): The repository, as for `Checkpointer`.
        run (str): The run's name.
        **options: Further arguments of `RepositoryWriter`, such as `compression` or `storage_options`.

    Attributes:
        metadata (Mapping[str, int | float | bool | str | None]): Metadata of the next step, such as `{"loss": 2.1}`. Set it
            before each save. That of rank 0 is stored. Default: none.
    """

    def __init__(self, url: str, *, run: str, **options: Any) -> None:
        super().__init__(BACKEND, 1)
        self.metadata: Mapping[str, Value] = options.pop("metadata", None) or {}
        self._url, self._run, self._options = url, run, options
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}
        self._last: Future[None] | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        metadata = step_metadata.check(self.metadata)
        self._save(_for_dcp(_grouped(sharded_state_dict), loading=False), checkpoint_dir, None, metadata)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        metadata = step_metadata.check(self.metadata)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        if self._last is not None:
            self._last.exception()  # the next save reuses its copies; its finalization raises any error
        state = _for_dcp(self._copied(_grouped(sharded_state_dict)), loading=False)
        self._last = saving = Future[None]()
        probe = PeerProbe("127.0.0.1")

        def commit() -> None:
            try:
                self._save(state, checkpoint_dir, self._group, metadata)
                saving.set_result(None)
            except BaseException as error:
                saving.set_exception(error)
            finally:
                probe.close()

        Thread(target=commit, name="headrace-megatron-save").start()
        return AsyncRequest(wait_closed, (probe.address,), [saving.result])

    def _save(
        self,
        state: dict[str, Any],
        checkpoint_dir: str | Path,
        group: dist.ProcessGroup | None,
        metadata: Mapping[str, Value],
    ) -> None:
        step = step_of(str(checkpoint_dir))
        writer = RepositoryWriter(self._url, run=self._run, step=step, metadata=metadata, **self._options)
        planner = mcore.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)

    def _copied(self, flat: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The state with its tensors copied into main memory. Each save reuses this memory."""
        reused, self._copies = self._copies, {}

        def copy(number: int, item: Any) -> Any:
            if not isinstance(item, ShardedTensor) or item.data is None:
                return item
            place = (item.key, number, item.data.shape, item.data.dtype)
            room = reused.get(place)
            if room is None:
                room = torch.empty_like(item.data, device="cpu", memory_format=torch.contiguous_format)
            self._copies[place] = room.copy_(item.data.detach())
            return dataclasses.replace(item, data=room)

        return {key: [copy(number, each) for number, each in enumerate(found)] for key, found in flat.items()}


class RepositoryLoad(LoadShardedStrategy):  # type: ignore[misc, unused-ignore]
    """A load strategy: `dist_checkpointing.load(state, folder, RepositoryLoad(url, run=...))`.

    Args:
        url (str): The repository, as for `Checkpointer`.
        run (str): The run's name.
        **options: Further arguments of `RepositoryReader`, such as `storage_options`.
    """

    def __init__(self, url: str, *, run: str, **options: Any) -> None:
        self._url, self._run, self._options = url, run, options
        self.cached_global_metadata: Metadata | None = None  # Megatron-Core's save strategies read it after a load

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        flat, mapping, renamed = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        into = _for_dcp(flat, loading=True)
        tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        planner = mcore.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        dcp.load(into, storage_reader=self._reader(checkpoint_dir), planner=planner)
        loaded = {
            key: unpacked(value) if isinstance(flat[key][0], ShardedObject) else mcore._unwrap_pyt_sharded_tensor(value)
            for key, value in into.items()
        }
        result = mcore._replace_sharded_keys_with_state_dict_keys(loaded, mapping, renamed)
        mcore._restore_dict_types(result, sharded_state_dict)
        return result

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Metadata | None = None) -> Any:
        """The sharded tensors by key, without data."""
        entries = metadata or self._metadata(checkpoint_dir)
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            ).without_data()
            for key, entry in entries.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """The sharded tensors and objects by key, without data."""
        metadata = self._metadata(checkpoint_dir)
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, entry in metadata.state_dict_metadata.items()
            if not isinstance(entry, TensorStorageMetadata)
        ]
        return {each.unique_key: each for each in objects} | self.load_tensors_metadata(checkpoint_dir, metadata)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        raise UnsupportedError(
            "a saved step cannot be changed", hint="load it, and save the other tensors as another step"
        )

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise UnsupportedError(
                f"backend {loaded_backend!r:.60} wrote the checkpoint in this folder",
                hint="load it with Megatron's own strategy",
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise UnsupportedError(
                f"the checkpoint needs version {loaded_version} of the backend; this is version 1",
                hint="upgrade headrace",
            )

    def _reader(self, checkpoint_dir: str | Path) -> RepositoryReader:
        return RepositoryReader(self._url, run=self._run, step=step_of(str(checkpoint_dir)), **self._options)

    def _metadata(self, checkpoint_dir: str | Path) -> Metadata:
        reader = self._reader(checkpoint_dir)
        try:
            return reader.read_metadata()
        finally:
            reader.reset()


def _grouped(sharded_state_dict: Any) -> Any:
    """The tensors and objects that this rank writes, by sharded key."""
    return mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)[0]


def _for_dcp(flat: Any, *, loading: bool) -> dict[str, Any]:
    """The state by sharded key, in the form for DCP.

    Objects become plain values, because Megatron-Core would pickle them.
    """
    tensors = {key: found for key, found in flat.items() if isinstance(found[0], ShardedTensor)}
    objects = {key: found for key, found in flat.items() if isinstance(found[0], ShardedObject)}
    by_key: dict[str, Any] = mcore.mcore_to_pyt_state_dict(tensors, loading)
    return by_key | {key: b"" if loading else packed([each.data for each in found]) for key, found in objects.items()}
