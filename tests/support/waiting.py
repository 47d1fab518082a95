"""Waiting for what another thread or process does, with a bound that only something broken reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """What `condition` gives once it is true."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        time.sleep(0.005)
    return found
