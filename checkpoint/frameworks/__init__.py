"""Adapters for other trainers. Each framework has one module, which imports only that framework.

- `torchtitan`: a checkpoint manager.
- `megatron`: save and load strategies of Megatron-Core; `plain` encodes its objects.
- `torch_checkpointing`: a storage and a manager.
- `lightning`: a `CheckpointIO`.
- `transformers`: a `Trainer`, and a callback; `transformers_data`: a `Trainer` on a Headrace loader.
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
