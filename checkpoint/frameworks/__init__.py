"""Our checkpoints in trainers that others wrote: one small module for each, importing its framework and nothing else of
the sort.

`lightning`: a CheckpointIO; `transformers`: a callback of the Trainer; `accelerate`: hooks of save_state and load_state.
Trainers that save through torch.distributed.checkpoint take `checkpoint.dcp` instead.
Invariant: importing this package imports no framework.
Failure behaviour: errors of `dataio.core.errors`; a framework that is not installed is an ImportError of its own.
"""
