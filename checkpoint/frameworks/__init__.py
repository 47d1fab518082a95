"""Adapters for other trainers. Each framework has one module, which imports only that framework.

- `torchtitan`: a checkpoint manager.
- `megatron`: save and load strategies of Megatron-Core; `plain` encodes its objects.
- `torch_checkpointing`: a storage and a manager.
- `lightning`: a `CheckpointIO`; `lightning_callbacks`: callbacks that bring it, resume and log to trackers.
- `transformers`: a `Trainer`, and a callback; `transformers_data`: a `Trainer` on a Headrace loader.
- `vllm`: an engine of vLLM's weight transfer that loads published weights.
- `accelerate`: hooks of `save_state` and `load_state`.

Trainers that save through torch.distributed.checkpoint use `headrace.checkpoint.dcp` instead.

To add a framework, write or change four files:

1. `frameworks/<name>.py`: the adapter. If the framework names checkpoints by files or folders, use `naming.Names`. It
   publishes a name after its step is committed. If the framework calls torch.distributed.checkpoint, use
   `RepositoryWriter` and `RepositoryReader`. Otherwise, call `Checkpointer.save_as` and `restore`.
2. `tests/support/train_<name>.py`: a small training job. The tests in `tests/checkpoint/frameworks` kill and resume it.
3. `tests/checkpoint/frameworks/test_frameworks.py`: tests of the adapter's own behaviour, with the real package.
4. `pyproject.toml`: the package in the extra `frameworks`, and in mypy's list of frameworks.

Invariant: importing this package imports no framework.

Failure behaviour: errors of `headrace.dataio.core.errors`. A framework that is not installed raises its own
ImportError.
"""

from __future__ import annotations

import contextlib


def register_vllm() -> None:
    """Make `headrace` a backend of vLLM's weight transfer. vLLM calls it in each of its processes, as a plug-in.

    Nothing of the engine is imported until vLLM creates it.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(
            "headrace", "headrace.checkpoint.frameworks.vllm", "PublishedWeightsEngine"
        )
