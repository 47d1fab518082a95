"""Saving under a bf16 transformer: what the trainer sees of it, eagerly and lazily staged."""

from __future__ import annotations

import statistics
import tempfile
import time

from headrace.bench.drill.model import Trainer
from headrace.bench.drill.result import PartResult

LINE = "lazy and eager staging under a bf16 transformer step: visible stall, slow-down of the steps meanwhile"


def run(gpu: bool) -> PartResult:
    """Steps alone; steps with a save among them, both ways."""
    part = PartResult("lazy", "Saves under a bf16 transformer", against="eager")
    part.metric("step", "step alone", "ms")
    part.metric("visible", "visible stall of a save: longer than the median step by", "ms")
    part.metric("slow", "steps slower while it goes on", "%")
    part.metric("durable", "committed after", "s")
    trainer = Trainer(gpu)
    trainer.seconds_a_step(3)
    alone = trainer.seconds_a_step(30 if gpu else 10)
    base = statistics.median(alone)
    part.settings = {"state_gib": round(trainer.state_bytes() / 2**30, 3), "device": str(trainer.device)}
    for mode in ("lazy", "eager"):
        part.add(mode, "step", *(1e3 * seconds for seconds in alone))
        try:
            _saves(part, trainer, mode, base)
        except Exception as error:
            part.fail(mode, f"{type(error).__name__}: {error}")
    return part


def _saves(part: PartResult, trainer: Trainer, mode: str, base: float) -> None:
    from headrace.checkpoint import Checkpointer

    with (
        tempfile.TemporaryDirectory(prefix="mrb-") as folder,
        Checkpointer(folder, run="drill", sidecar=None, staging=mode) as checkpointer,
    ):
        for step in range(1, 5):
            began = time.perf_counter()
            handle = checkpointer.save(step, trainer.state())
            held = time.perf_counter() - began
            during: list[float] = []
            while not handle.done and len(during) < 400:
                during += trainer.seconds_a_step(1)
            handle.result(timeout=400)
            if step == 1:
                continue  # the arena is made
            part.add(mode, "durable", time.perf_counter() - began)
            part.add(mode, "visible", 1e3 * (held + max(0.0, sum(during[:2]) - base * len(during[:2]))))
            if during:
                part.add(mode, "slow", 100 * (statistics.median(during) / base - 1))
