"""Checkpoints of torch.distributed.checkpoint (DCP) in our repository: one argument of `dcp.save`, `dcp.async_save`,
`dcp.load`.

    dcp.save(state, storage_writer=RepositoryWriter("s3://bucket/ckpt", run="exp42", step=1200))
    dcp.load(state, storage_reader=RepositoryReader("s3://bucket/ckpt", run="exp42", step=1200))

`writer` and `reader` are DCP's two seams; `document` is the rank's document of a step that was saved so; `session` is what
a process remembers of its runs between saves.
Invariant: DCP's planners decide what is saved and loaded; everything else (chunks, digests, packs, commit) is the
repository's. What is stored holds no pickle, and nothing that came from the store is unpickled.
Failure behaviour: errors of `headrace.dataio.core.errors`, which DCP wraps: see `writer` and `reader`.
"""

from __future__ import annotations

from headrace.checkpoint.dcp.reader import RepositoryReader
from headrace.checkpoint.dcp.writer import RepositoryWriter

__all__ = ["RepositoryReader", "RepositoryWriter"]
