"""Storage for torch.distributed.checkpoint (DCP): one argument of `dcp.save`, `dcp.async_save` and `dcp.load`.

    dcp.save(state, storage_writer=RepositoryWriter("s3://bucket/ckpt", run="exp42", step=1200))
    dcp.load(state, storage_reader=RepositoryReader("s3://bucket/ckpt", run="exp42", step=1200))

Invariant: DCP's planners decide which entries are saved and loaded. The repository does the rest (chunks, digests,
packs, commit). No pickle is stored, and nothing from the store is unpickled.

Failure behaviour: errors of `headrace.dataio.core.errors`. DCP wraps them, as `writer` and `reader` describe. Without
torch, using a name raises an error that names the extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.dataio.core.imports import exports

if TYPE_CHECKING:
    from headrace.checkpoint.dcp.reader import RepositoryReader
    from headrace.checkpoint.dcp.writer import RepositoryWriter

__all__ = ["RepositoryReader", "RepositoryWriter"]

_HOME = {
    "RepositoryReader": "headrace.checkpoint.dcp.reader",
    "RepositoryWriter": "headrace.checkpoint.dcp.writer",
}

__getattr__, __dir__ = exports(__name__, _HOME)
