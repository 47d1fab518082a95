"""The others: torch.save, safetensors, torch.distributed.checkpoint in its kinds, torch_checkpointing, s3torchconnector.

Invariant: as in `built`; what a library leaves in the page cache is fsynced here, as a trainer that needs it would.
Failure behaviour: exceptions go on up and fail the candidate.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as tdc

from headrace.bench.checkpointing.built import SECONDS, Built, Wait
from headrace.bench.checkpointing.training import State, Training

_REGION = "us-east-1"


class _Paths:
    """A new place for every save."""

    def __init__(self, where: str) -> None:
        self._where, self._count = where, 0
        if "://" not in where:
            os.makedirs(where, exist_ok=True)

    def next(self) -> str:
        self._count += 1
        return self.last

    @property
    def last(self) -> str:
        return f"{self._where}/{self._count}"


def torch_save(where: str, training: Training) -> Built:
    paths = _Paths(where)

    def save(values: State) -> Wait:
        with open(paths.next(), "wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def restore(target: State) -> None:
        for name, tensor in torch.load(paths.last, weights_only=True).items():
            target[name].copy_(tensor)

    return Built(save, restore)


def safetensors(where: str, training: Training) -> Built:
    library: Any = importlib.import_module("safetensors.torch")
    paths = _Paths(where)

    def save(values: State) -> Wait:
        library.save_file({name: tensor.contiguous() for name, tensor in values.items()}, paths.next())
        _sync(paths.last)
        return lambda: None

    def restore(target: State) -> None:
        for name, tensor in library.load_file(paths.last).items():
            target[name].copy_(tensor)

    return Built(save, restore)


def dcp(where: str, training: Training, *, kind: str) -> Built:
    """`kind`: sync, thread, process, or stager (a thread, with DCP's cached staging area)."""
    paths = _Paths(where)

    def writer() -> Any:
        return tdc.FileSystemWriter(paths.next(), thread_count=2)

    return _dcp(writer, lambda: tdc.FileSystemReader(paths.last), kind)


def _dcp(writer: Callable[[], Any], reader: Callable[[], Any], kind: str) -> Built:
    group, made = _group()
    more: dict[str, Any] = {}
    if kind == "stager":
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        plain = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        more["async_stager"] = DefaultStager(plain)
    elif kind == "process":
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        more["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS

    def save(values: State) -> Wait:
        if kind == "sync":
            tdc.save(values, storage_writer=writer(), process_group=group)
            return lambda: None
        found: Any = tdc.async_save(values, storage_writer=writer(), process_group=group, **more)
        future = getattr(found, "upload_completion", found)
        return lambda: future.result(SECONDS)

    def restore(target: State) -> None:
        tdc.load(target, storage_reader=reader(), process_group=group)

    return Built(save, restore, dist.destroy_process_group if made else (lambda: None))


def _group() -> tuple[Any, bool]:
    """A group of its own for what a saver says in the background; whether the default one was made for it."""
    if dist.is_initialized():
        return dist.new_group(backend="gloo"), False
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))  # DCP's process asks for both
    dist.init_process_group("gloo", rank=0, world_size=1)
    return None, True


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def torch_checkpointing(where: str, training: Training) -> Built:
    """Asynchronous, with staging in the background and a process that writes; its files are fsynced behind it."""
    library: Any = importlib.import_module("torch_checkpointing.checkpoint_manager")
    config: Any = importlib.import_module("torch_checkpointing.config")
    staging: Any = importlib.import_module("torch_checkpointing.staging")
    storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    stager = staging.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = library.CheckpointManager(
        library.CheckpointManager.Config(
            save=config.AsyncCheckpointSaverConfig(staging_config=stager),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),  # its O_DIRECT fails on ext4
        )
    )
    paths = _Paths(where)

    def save(values: State) -> Wait:
        future = manager.save(paths.next(), {"state": values})

        def wait() -> None:
            future.result(SECONDS)
            for path in Path(paths.last).rglob("*"):
                _sync(str(path))

        return wait

    def restore(target: State) -> None:
        found = manager.load(paths.last, into={"state": target})["state"]
        for name, tensor in target.items():
            if found[name] is not tensor:
                tensor.copy_(found[name])

    return Built(
        save, restore, manager.close, manager.lock, lambda: manager.prewarm_staging({"state": training.state()})
    )


def s3torchconnector(where: str, training: Training) -> Built:
    """Its DCP storage, synchronous, as its documentation shows it."""
    library: Any = importlib.import_module("s3torchconnector.dcp")
    client: Any = importlib.import_module("s3torchconnector")
    config = client.S3ClientConfig(force_path_style=True)
    paths = _Paths(where)

    def writer() -> Any:
        return library.S3StorageWriter(region=_REGION, path=paths.next(), s3client_config=config, thread_count=2)

    def reader() -> Any:
        return library.S3StorageReader(region=_REGION, path=paths.last, s3client_config=config)

    return _dcp(writer, reader, "sync")


def dcp_fsspec(where: str, training: Training) -> Built:
    """DCP's own way to object stores, through s3fs."""
    fsspec: Any = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    paths = _Paths(where)
    options = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    return _dcp(
        lambda: fsspec.FsspecWriter(paths.next(), thread_count=2, sync_files=False, **options),
        lambda: fsspec.FsspecReader(paths.last, **options),
        "sync",
    )


def _sync(path: str) -> None:
    with contextlib.suppress(IsADirectoryError), open(path, "rb+") as file:
        os.fsync(file.fileno())
