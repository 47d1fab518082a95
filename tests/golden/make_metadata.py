"""Writes the golden files of steps with metadata: `python -m tests.golden.make_metadata FOLDER`.

Purpose: a repository with what note 0046 adds: metadata of every kind, descriptions, an artifact, and a job of five
ranks in groups of two. `tests/golden/test_golden.py` reads it with the present code.
"""

from __future__ import annotations

import sys
import threading

import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import group, names
from headrace.checkpoint.format.chunking import Box, TensorSpec
from headrace.checkpoint.format.metadata import Metadata
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import begin, make, save

SINGLE, GROUPED, WORLD, EACH = "single", "grouped", 5, 16
METADATA: dict[int, Metadata] = {
    1: {"loss": 2.5, "tokens": 10**9, "note": "warm-up done ü", "done": False, "gap": None, "least": -(2**63)},
    2: {"loss": float("nan"), "score": float("-inf"), "done": True},
    3: {},
}
ARTIFACT = b"lr: 0.001\n" * 20


def box(rank: int) -> Box:
    return Box((EACH * WORLD,), (EACH * rank,), (EACH,))


def contents(rank: int) -> bytes:
    return bytes([rank]) * EACH


def single(folder: str) -> None:
    with Checkpointer(folder, run=SINGLE, sidecar=None, record=False) as checkpointer:
        checkpointer.describe(config={"lr": 1e-3, "layers": [1, 2]}, code="3f2a9c1")
        for step, metadata in METADATA.items():
            if step == 2:
                checkpointer.put_artifact(step, "configs/train.yaml", ARTIFACT)
            checkpointer.save(step, {"w": torch.arange(9.0) * step}, metadata=metadata).result(60)


def grouped(folder: str) -> None:
    names.GROUP_RANKS = 2
    plan = group.plan_digest(
        [group.share_digest([TensorSpec("w", "uint8", box(rank), replicated=True)]) for rank in range(WORLD)]
    )
    with open_store(folder) as store:
        number, attempt = begin(store, run=GROUPED), names.new_id()
        ranks = [
            make(
                store,
                [("w", box(rank), contents(rank))],
                step=1,
                number=number,
                attempt=attempt,
                rank=rank,
                world_size=WORLD,
                replicas=plan,
                run=GROUPED,
                metadata={"rank": rank, "loss": 0.5},
            )
            for rank in range(WORLD)
        ]
        threads = [threading.Thread(target=save, args=(store, each)) for each in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    single(sys.argv[1])
    grouped(sys.argv[1])
