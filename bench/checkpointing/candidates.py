"""Savers and restorers, each behind the same three calls.

Invariant: a wait returns only when what was saved has been fsynced. Failure behaviour: exceptions go on up and fail the
candidate; a package that is not installed fails it with its name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.checkpointing.training import State, Training

Wait = Callable[[], object]
SECONDS = 240


@dataclass(frozen=True)
class Built:
    """`save` returns when training may go on, its result waits until durable; `before_step` as an optimizer's hook."""

    save: Callable[[State], Wait]
    restore: Callable[[State], object]
    close: Callable[[], object]
    before_step: Callable[[], object] = lambda: None


def millrace(directory: Path, training: Training, **options: Any) -> Built:
    """In this process, without a sidecar."""
    from checkpoint import Checkpointer

    checkpointer = Checkpointer(str(directory), run="bench", sidecar=None, **options)
    steps = iter(range(1, 10_000))

    def save(values: State) -> Wait:
        given: dict[str, Any] = {"state": values}
        if options.get("staging") == "lazy":
            given["optimizer"] = training.optimizer  # whose tensors are the state's: stored once
        handle = checkpointer.save(next(steps), given)
        return partial(handle.result, SECONDS)

    def restore(target: State) -> None:
        checkpointer.restore({"state": target}, include="state/*")

    def warm() -> None:
        checkpointer.warm_up({"state": training.state()})

    warm()
    return Built(save, restore, checkpointer.close)


def torch_save(directory: Path, training: Training) -> Built:
    paths: list[Path] = []

    def save(values: State) -> Wait:
        paths.append(directory / f"{len(paths)}.pt")
        with paths[-1].open("wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def restore(target: State) -> None:
        for name, tensor in torch.load(paths[-1], weights_only=True).items():
            target[name].copy_(tensor)

    return Built(save, restore, lambda: None)


def safetensors(directory: Path, training: Training) -> Built:
    from safetensors.torch import load_file, save_file  # type: ignore[import-not-found,unused-ignore]

    paths: list[Path] = []

    def save(values: State) -> Wait:
        paths.append(directory / f"{len(paths)}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in values.items()}, paths[-1])
        with paths[-1].open("rb+") as file:
            os.fsync(file.fileno())
        return lambda: None

    def restore(target: State) -> None:
        for name, tensor in load_file(paths[-1]).items():
            target[name].copy_(tensor)

    return Built(save, restore, lambda: None)


def dcp(directory: Path, training: Training, *, kind: str) -> Built:
    """torch.distributed.checkpoint: `kind` is sync, thread, or stager (asynchronous, with its cached staging area)."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as tdc

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    paths: list[Path] = []
    more: dict[str, Any] = {}
    if kind == "stager":
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        more["async_stager"] = DefaultStager(options)

    def save(values: State) -> Wait:
        paths.append(directory / str(len(paths)))
        writer = tdc.FileSystemWriter(paths[-1], thread_count=2)
        if kind == "sync":
            tdc.save(values, storage_writer=writer)
            return lambda: None
        found: Any = tdc.async_save(values, storage_writer=writer, **more)
        future = getattr(found, "upload_completion", found)
        return lambda: future.result(SECONDS)

    def restore(target: State) -> None:
        tdc.load(target, storage_reader=tdc.FileSystemReader(paths[-1]))

    return Built(save, restore, dist.destroy_process_group)


BUILD: dict[str, Callable[[Path, Training], Built]] = {
    "millrace": millrace,
    "millrace, lazy": partial(millrace, staging="lazy"),
    "torch.save": torch_save,
    "dcp.save": partial(dcp, kind="sync"),
    "dcp.async_save": partial(dcp, kind="thread"),
    "dcp.async_save, stager": partial(dcp, kind="stager"),
}
if importlib.util.find_spec("safetensors") is not None:
    BUILD["safetensors"] = safetensors
