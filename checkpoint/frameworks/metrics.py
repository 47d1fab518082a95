"""Turns the metrics of a framework into metadata of a step.

Invariant: the result can be stored. Values that are not scalars, and names that cannot be stored, are left out.
Failure behaviour: none. Metrics never fail a save.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format.metadata import Metadata
from headrace.dataio.core.errors import UsageError


def scalars(metrics: Mapping[str, object]) -> Metadata:
    """The numbers, texts and booleans in `metrics`, and its tensors of one element.

    Args:
        metrics (Mapping[str, object]): Values by name.

    Returns:
        Metadata: What `Checkpointer.save` takes as `metadata`.

    Example:
        >>> scalars({"loss": torch.tensor(2.5), "epoch": 3, "histogram": [1, 2]})
        {'loss': 2.5, 'epoch': 3}
    """
    found: Metadata = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.detach().item()
            if value is not None:
                found = step_metadata.check({**found, name: value})
        except (UsageError, RuntimeError, NotImplementedError):  # for example, a tensor without memory
            continue
    return found
