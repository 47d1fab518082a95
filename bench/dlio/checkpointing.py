"""DLIO's `checkpoint_mechanism_classname`: its state, saved by a `Checkpointer` into its checkpoint folder.

Invariant: `checkpoint` returns when the step is committed, as DLIO's own mechanisms return when their files are written;
so DLIO's figures are times to durable, not stalls. With `checkpoint.type: rank_zero` rank 0 saves alone. Failure
behaviour: a save that fails raises and ends the run.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.common.enumerations import CheckpointLocationType

from headrace.checkpoint import Checkpointer

_WAIT_SECONDS = 600.0


class HeadraceCheckpointing(BaseCheckpointing):  # type: ignore[misc,unused-ignore]
    """A singleton, as DLIO wants it. `saved` are the steps committed by this process."""

    _instance: ClassVar[HeadraceCheckpointing | None] = None

    @classmethod
    def get_instance(cls) -> Self:
        """The one of this process."""
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

    def get_tensor(self, size: int) -> torch.Tensor:
        """`size` bytes that are not all the same, or deduplication would win what no training gives it."""
        generator = torch.Generator().manual_seed(size + 7919 * self.args.my_rank)
        return torch.randint(-128, 127, (size,), dtype=torch.int8, generator=generator)

    def save_state(self, suffix: str, state: Any) -> None:
        """Unused: a step is saved whole."""

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """Save what this rank holds and wait for the commit."""
        if not self._mine:
            return
        state = {"model": self.model_state, "optimizer": self.optimization_state, "layers": self.layer_state}
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
