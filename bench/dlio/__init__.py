"""Plugins for DLIO (github.com/argonne-lcf/dlio_benchmark), so that the original harness drives our loader and our checkpoints.

    python -m headrace.bench.dlio.prepare DATA_FOLDER        puts the files that DLIO generated into tar shards with an index
    dlio_benchmark workload=unet3d_h100 \\
        ++workload.reader.data_loader_classname=headrace.bench.dlio.loader.HeadraceDataLoader \\
        ++workload.reader.data_loader_sampler=iterative \\
        ++workload.checkpoint.checkpoint_mechanism_classname=headrace.bench.dlio.checkpointing.HeadraceCheckpointing

Written for and run with dlio_benchmark 2.0.0, which is not a dependency: its package wants TensorFlow.
`docs/benchmarks.md` says how to install it without.
"""
