"""Applies versions of `policy` and prints a line of JSON for each: `subscriber_process URL SOCKET STEP...`.

SOCKET is that of the node's daemon, or "" for none. The process waits for each STEP in turn, and ends after the last. A line has
the step, the digests of the tensors, and the bytes that came through the sidecar and from the store.
"""

from __future__ import annotations

import json
import sys

import torch

from headrace.checkpoint import Subscriber
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.publishing.subscriber import NewVersion
from headrace.dataio.sidecar.store import SidecarStore


def empty(version: NewVersion) -> dict[str, torch.Tensor]:
    """Tensors in the form of the version."""
    return {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in version._weights.tensors}


def digests(held: dict[str, torch.Tensor]) -> dict[str, str]:
    """The digest of each tensor."""
    return {name: digest(value.reshape(-1).view(torch.uint8).numpy().data).hex() for name, value in held.items()}


def main(url: str, socket: str, *steps: str) -> None:
    held: dict[str, torch.Tensor] = {}
    with Subscriber(url, "policy", poll=0.2, sidecar=socket or None) as subscriber:
        for step in map(int, steps):
            version = subscriber.wait(120)
            while version.step != step:
                version = subscriber.wait(120)
            held = held or empty(version)
            version.apply(held)
            read = subscriber.store.bytes if isinstance(subscriber.store, SidecarStore) else {}
            print(json.dumps({"step": version.step, "digests": digests(held), "read": read}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
