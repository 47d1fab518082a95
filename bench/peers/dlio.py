"""Plugins for DLIO (github.com/argonne-lcf/dlio_benchmark): the original harness runs our loader and our checkpoints.

`docs/benchmarks.md` has the commands. The plugins were written for and run with dlio_benchmark 2.0.0. It is not a
dependency, because its package requires TensorFlow.

Invariants: each rank gets its share of every epoch. Bytes are checked against the index. Every pass is the next epoch,
in another order, as `sample_shuffle` requires.

Failure behaviour: without a dataset, a `UsageError` tells how to make one. Errors of the loader end the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.common.enumerations import CheckpointLocationType, DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

from headrace.bench.workloads.dlio import place_of
from headrace.checkpoint import Checkpointer
from headrace.dataio import Dataset
from headrace.dataio.core.errors import UsageError
from headrace.loaders import FileLoader


class HeadraceDataLoader(BaseDataLoader):  # type: ignore[misc,unused-ignore]
    """DLIO's `data_loader_classname`: a `FileLoader` for each of DLIO's two datasets, kept over all epochs."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._loader: FileLoader | None = None

    def read(self) -> None:
        """Open the dataset, unless an earlier epoch did."""
        if self._loader is not None:
            return
        args, kind = self._args, "valid" if "valid" in str(self.dataset_type).lower() else "train"
        folder = Path(args.data_folder)
        place = place_of(folder, kind)
        if not (place / "dataset.json").exists():
            raise UsageError(f"{place} holds no dataset", hint=f"run: python -m headrace.bench.workloads.dlio {folder}")
        self._loader = file_loader(place, self.batch_size, args.my_rank, args.comm_size, args.seed)

    def next(self) -> Iterator[list[torch.Tensor]]:
        """Yield the batches of one epoch: this rank's samples as bytes in host memory."""
        self.read()
        assert self._loader is not None
        for batch in self._loader:
            yield samples(batch)

    def finalize(self) -> None:
        """Do nothing. DLIO calls this after each epoch, and the loader continues with the next one."""


def samples(batch: dict[str, Any]) -> list[torch.Tensor]:
    """Return the bytes of each sample of a batch, uint8."""
    return list(batch["bytes"].split(batch["sizes"].sum(1).tolist()))


def file_loader(place: Path, batch_size: int, rank: int, world_size: int, seed: int) -> FileLoader:
    """Open a loader of all files of each sample, without decoding."""
    with Dataset(str(place), trust_mounts=True) as dataset:
        files = [member.ext for member in dataset.sample(0).members]
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed}
    return FileLoader(str(place), batch_size, files=files, sidecar=None, drop_last=False, trust_mounts=True, **options)


_WAIT_SECONDS = 600.0


def change(state: Any) -> None:
    """Fill all tensors of `state`, a nested dict or list, with new random bytes, as if every weight had changed."""
    if isinstance(state, torch.Tensor):
        state.view(torch.int8).random_(-128, 127)
    elif isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            change(one)


class HeadraceCheckpointing(BaseCheckpointing):  # type: ignore[misc,unused-ignore]
    """DLIO's `checkpoint_mechanism_classname`: a `Checkpointer` saves DLIO's state into its checkpoint folder.

    DLIO requires a singleton. `checkpoint` returns when the step is committed, so DLIO's figures are times until the
    save is durable, not stalls. DLIO never changes its state, so all saves after the first would be deduplicated to
    nothing. Therefore `checkpoint` fills it with new random bytes first, and DLIO's time includes that. With
    `checkpoint.type: rank_zero`, rank 0 saves alone. A save that fails raises and ends the run. `saved` has the steps
    that this process committed.
    """

    _instance: ClassVar[HeadraceCheckpointing | None] = None

    @classmethod
    def get_instance(cls) -> Self:
        """Return the instance of this process."""
        if cls._instance is None:
            cls._instance = cls()
        assert isinstance(cls._instance, cls)
        return cls._instance

    def __init__(self) -> None:
        self.model_state = self.optimization_state = self.layer_state = None
        super().__init__("headrace")
        self._alone = self.args.checkpoint_type == CheckpointLocationType.RANK_ZERO
        self._mine = not self._alone or self.args.my_rank == 0
        self._checkpointer: Checkpointer | None = None
        self.saved: list[int] = []
        self._saves_begun = False

    def get_tensor(self, size: int) -> torch.Tensor:
        """Return `size` random bytes. Equal bytes would be deduplicated, unlike those of a real training run."""
        generator = torch.Generator().manual_seed(size + 7919 * self.args.my_rank)
        return torch.randint(-128, 127, (size,), dtype=torch.int8, generator=generator)

    def save_state(self, suffix: str, state: Any) -> None:
        """Do nothing. `checkpoint` saves the whole step."""

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """Save the state of this rank and wait for the commit."""
        if not self._mine:
            return
        state = {"model": self.model_state, "optimizer": self.optimization_state, "layers": self.layer_state}
        if self._saves_begun:
            change(state)
        self._saves_begun = True
        step = epoch * 1_000_000 + step_number
        self._open().save(step, {name: value for name, value in state.items() if value}).result(_WAIT_SECONDS)
        self.saved.append(step)

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            ranks = 1 if self._alone else self.args.comm_size
            if ranks > 1 and not torch.distributed.is_initialized():
                place = f"file://{self.args.checkpoint_folder}/.rendezvous"
                torch.distributed.init_process_group("gloo", place, rank=self.args.my_rank, world_size=ranks)
            rank = 0 if self._alone else self.args.my_rank
            url = f"{self.args.checkpoint_folder}/repository"
            self._checkpointer = Checkpointer(url, run="dlio", sidecar=None, rank=rank, world_size=ranks)
        return self._checkpointer

    def finalize(self) -> None:
        """Close the repository."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
