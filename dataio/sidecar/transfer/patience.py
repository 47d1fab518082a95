"""How long a checkpoint is tried again whose worker failed while its trainer is gone. Pure.

Invariants: pauses grow to `longest`, with jitter, so that the nodes of a cluster do not all come back to a store at once; the
last try begins `limit` seconds after the first failure, and none later.
Failure behaviour: none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    limit: float = 3600.0
    first: float = 1.0
    longest: float = 60.0

    def pause(self, failures: int, elapsed: float, draw: float) -> float | None:
        """Seconds until the next try, when `failures` have failed, the first of them `elapsed` seconds ago; None when there is
        to be none. `draw` is in [0, 1)."""
        left = self.limit - elapsed
        if left <= 0:
            return None
        most = min(self.longest, self.first * 2.0 ** min(failures - 1, 32))
        return min(most * (1 + draw) / 2, left)
