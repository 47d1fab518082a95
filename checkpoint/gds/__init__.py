"""GPUDirect Storage: moves checkpoint bytes directly between files and GPU memory, where cuFile works.

- `file`: ranges of a file, and the probe that tests whether cuFile works here.
- `saving`, `restoring`: the packs that `Checkpointer(..., gds=True)` writes, and the raw chunks that it reads.

Invariant: every chunk is hashed on a copy in host memory, before it is written and before it reaches a tensor.
Failure behaviour: where cuFile does not work, bytes are copied through host memory, and the reason is logged once.
"""

from __future__ import annotations

from headrace.checkpoint.gds.file import ALIGNMENT, CUFILE, CuFile, Direct, GpuFile, Verdict, probe
from headrace.checkpoint.gds.restoring import GdsStore, direct_for

__all__ = ["ALIGNMENT", "CUFILE", "CuFile", "Direct", "GdsStore", "GpuFile", "Verdict", "direct_for", "probe"]
