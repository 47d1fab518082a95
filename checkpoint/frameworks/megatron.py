"""Megatron-Core: `dist_checkpointing.save(state, folder, RepositorySave(url, run=...))` and
`dist_checkpointing.load(state, folder, RepositoryLoad(url, run=...))`.

The sharded tensors and objects of the state are a step of the repository: the number that ends the folder's name
(`iter_0001200`). Megatron-Core writes what is left into the folder itself, `common.pt` and `metadata.json`, and allows nothing
else there. Both strategies go into its wrappers for parallel saving and loading (whose exchange at loading needs CUDA). Saving
ends with the commit; Megatron's asynchronous save wants a worker process of its own kind and is not offered: a `Checkpointer`
saves in the background.
Invariant: replicas are written once, by Megatron's own choice (`replica_id`); objects are plain values, arrays and bytes,
and never a pickle. Any number of ranks and any sharding may load.
Failure behaviour: as `checkpoint.dcp`; `UsageError` naming an object that cannot be saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as theirs
from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy, SaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpoint.dcp import RepositoryReader, RepositoryWriter
from checkpoint.dcp.writer import step_of
from checkpoint.frameworks.plain import packed, unpacked
from dataio.core.errors import UnsupportedError

BACKEND = "millrace"


class RepositorySave(SaveShardedStrategy):  # type: ignore[misc, unused-ignore]
    """`url`, `run` and `options` as for `RepositoryWriter`."""

    def __init__(self, url: str, *, run: str, **options: Any) -> None:
        super().__init__(BACKEND, 1)
        self._url, self._run, self._options = url, run, options

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        writer = RepositoryWriter(self._url, run=self._run, step=step_of(str(checkpoint_dir)), **self._options)
        planner = theirs.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        dcp.save(_for_dcp(flat, loading=False), storage_writer=writer, planner=planner)


class RepositoryLoad(LoadShardedStrategy):  # type: ignore[misc, unused-ignore]
    """`url`, `run` and `options` as for `RepositoryReader`."""

    def __init__(self, url: str, *, run: str, **options: Any) -> None:
        self._url, self._run, self._options = url, run, options
        self.cached_global_metadata: Metadata | None = None  # Megatron's savers look here after a load

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        flat, mapping, renamed = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        into = _for_dcp(flat, loading=True)
        tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        planner = theirs.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        dcp.load(into, storage_reader=self._reader(checkpoint_dir), planner=planner)
        loaded = {
            key: unpacked(value)
            if isinstance(flat[key][0], ShardedObject)
            else theirs._unwrap_pyt_sharded_tensor(value)
            for key, value in into.items()
        }
        found = theirs._replace_sharded_keys_with_state_dict_keys(loaded, mapping, renamed)
        theirs._restore_dict_types(found, sharded_state_dict)
        return found

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Metadata | None = None) -> Any:
        """{key: tensor without data}."""
        held = metadata or self._metadata(checkpoint_dir)
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            ).without_data()
            for key, entry in held.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """As above, and the objects."""
        metadata = self._metadata(checkpoint_dir)
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, entry in metadata.state_dict_metadata.items()
            if not isinstance(entry, TensorStorageMetadata)
        ]
        return {each.unique_key: each for each in objects} | self.load_tensors_metadata(checkpoint_dir, metadata)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        raise UnsupportedError("a step does not change once it is saved", hint="load it and save the rest as another")

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise UnsupportedError(
                f"the folder's checkpoint is of backend {loaded_backend!r:.60}",
                hint="load it with Megatron's own strategy",
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise UnsupportedError(
                f"version {loaded_version} of the backend is newer than this", hint="upgrade millrace"
            )

    def _reader(self, checkpoint_dir: str | Path) -> RepositoryReader:
        return RepositoryReader(self._url, run=self._run, step=step_of(str(checkpoint_dir)), **self._options)

    def _metadata(self, checkpoint_dir: str | Path) -> Metadata:
        reader = self._reader(checkpoint_dir)
        try:
            return reader.read_metadata()
        finally:
            reader.reset()


def _for_dcp(flat: Any, *, loading: bool) -> dict[str, Any]:
    """{sharded key: tensors or objects} as DCP takes it; Megatron itself would make pickles of the objects."""
    tensors = {key: found for key, found in flat.items() if isinstance(found[0], ShardedTensor)}
    objects = {key: found for key, found in flat.items() if isinstance(found[0], ShardedObject)}
    made: dict[str, Any] = theirs.mcore_to_pyt_state_dict(tensors, loading)
    return made | {key: b"" if loading else packed([each.data for each in found]) for key, found in objects.items()}
