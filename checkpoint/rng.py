"""The random generators of this process as one stateful object.

Invariant: after `load_state_dict(state_dict())` torch (CPU and every CUDA device), NumPy's global generator and
Python's `random` continue with the same numbers. The state is plain values and tensors, never a pickle.
Failure behaviour: if the number of CUDA devices differs, the devices that both have are restored, and a warning is
logged.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.log import get_logger, is_first

_log = get_logger(__name__)


class RNG:
    """The random generators of torch, NumPy and Python. Put one into the state of a `Checkpointer`; it is rank-local.

    Example:
        >>> import random
        >>> rng = RNG()
        >>> state = rng.state_dict()
        >>> first = random.random()
        >>> rng.load_state_dict(state)
        >>> random.random() == first
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators, as a dict with the keys "torch", "cuda", "numpy" and "python"."""
        numpy: Any = np.random.get_state(legacy=False)
        words = np.asarray(numpy["state"]["key"], dtype=np.uint32)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": {
                "generator": str(numpy["bit_generator"]),
                "key": words.tobytes(),
                "position": int(numpy["state"]["pos"]),
                "has_gauss": int(numpy["has_gauss"]),
                "gauss": float(numpy["gauss"]),
            },
            "python": random.getstate(),
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise the error of `load_state_dict(state)`, if it would raise one; change nothing."""
        torch.Generator().set_state(state["torch"])
        numpy: Any = np.random.get_state(legacy=False)
        generator = getattr(np.random, str(numpy["bit_generator"]))
        np.random.RandomState(generator()).set_state(_numpy_state(state["numpy"]))
        random.Random().setstate(state["python"])
        len(state["cuda"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        torch.set_rng_state(state["torch"])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices != len(state["cuda"]) and is_first("job"):
            _log.warning("random state of %d CUDA devices was saved, this process has %d", len(state["cuda"]), devices)
        for device, saved in enumerate(state["cuda"][:devices]):
            torch.cuda.set_rng_state(saved, device)
        np.random.set_state(_numpy_state(state["numpy"]))
        random.setstate(state["python"])


def _numpy_state(saved: dict[str, Any]) -> dict[str, Any]:
    """The state in the form that NumPy takes."""
    return {
        "bit_generator": saved["generator"],
        "state": {"key": np.frombuffer(saved["key"], np.uint32), "pos": saved["position"]},
        "has_gauss": saved["has_gauss"],
        "gauss": saved["gauss"],
    }
