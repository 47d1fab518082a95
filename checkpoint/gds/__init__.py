"""GPUDirect Storage: bytes of checkpoints between files and GPU memory, without a copy by the CPU where the machine can.

`probe` says whether cuFile works, here, now; `file` moves ranges of a file; `store` is that of a `Checkpointer(..., gds=True)`,
whose packs are written (`saving`) and whose raw chunks are read (`restoring`) so.
Invariant: what is verified elsewhere is verified here: chunks are hashed on a copy in host memory, at saving before they are
written, at restoring before they reach a tensor.
Failure behaviour: where cuFile does not work, everything goes through host memory, and one line of the log says why.
"""

from __future__ import annotations

from headrace.checkpoint.gds.file import ALIGNMENT, CUFILE, CuFile, Direct, GpuFile, Verdict, probe
from headrace.checkpoint.gds.restoring import GdsStore, direct_for

__all__ = ["ALIGNMENT", "CUFILE", "CuFile", "Direct", "GdsStore", "GpuFile", "Verdict", "direct_for", "probe"]
