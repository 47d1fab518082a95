"""A configuration for torchtitan's own Trainer: `torchtitan.train --module tests.support.torchtitan_trainer --config tiny`.

A Llama of two layers learns from rows of random tokens. Its steps are in a repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from headrace.checkpoint.frameworks.torchtitan import RepositoryCheckpointManager

VOCABULARY = 2048


class Rows(BaseDataLoader):  # type: ignore[misc, unused-ignore]
    """Rows of random tokens. The position is the seed of the next batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc, unused-ignore]
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._shape, self._position = (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(VOCABULARY, self._shape, generator=torch.Generator().manual_seed(self._position))
            self._position += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class NoTokenizer(BaseTokenizer):  # type: ignore[misc, unused-ignore]
    """The rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc, unused-ignore]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def tiny() -> Trainer.Config:
    """The configuration."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=6),
        training=TrainingConfig(local_batch_size=2, seq_len=32, disable_cuda_graphs=True),
        dataloader=Rows.Config(),
        tokenizer=NoTokenizer.Config(),
        debug=DebugConfig(seed=3),
        checkpoint=RepositoryCheckpointManager.Config(
            enable=True, run="exp", interval=2, last_save_model_only=False, keep_latest_k=0
        ),
    )
