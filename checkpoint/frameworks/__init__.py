"""Our checkpoints in trainers that others wrote: one small module for each, importing its framework and nothing else of
the sort.

`torchtitan`: a checkpoint manager; `megatron`: strategies of Megatron-Core for sharded states; `torch_checkpointing`: a storage
and a manager; `lightning`: a CheckpointIO; `transformers`: a Trainer, and a callback of theirs; `accelerate`: hooks of save_state
and load_state. `naming`, `mapping` and `plain` are what some of them share. Trainers that save through
torch.distributed.checkpoint take `headrace.checkpoint.dcp` instead.
Invariant: importing this package imports no framework.
Failure behaviour: errors of `headrace.dataio.core.errors`; a framework that is not installed is an ImportError of its own.
"""
