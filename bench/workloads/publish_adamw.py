"""`headrace bench publish --adamw`: how much of the weights one step of AdamW changes, and what an update of it costs.

A transformer with fp32 master weights learns to predict the bytes of Python's standard library, by AdamW at several
learning rates. It publishes bf16 weights after `WARM_UP` steps, and again after the next one. The second version is
measured.

Invariant: after each version, the subscriber's tensors hold the rounded weights.
Failure behaviour: a learning rate that fails is named, and the others continue.
"""

from __future__ import annotations

import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

from headrace.bench.core.command import Job
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part

RATES = (1e-6, 1e-5, 3e-4)
WARM_UP = 10
WIDTH, LAYERS, CONTEXT, BATCH = 384, 6, 128, 4
METRICS = {
    "changed": Metric("of the elements changed", "", "lower"),
    "published": Metric("of the bytes published", "", "lower"),
    "sparse": Metric("sparse", "", "lower", group="of the bytes in form"),
    "xor": Metric("XOR", "", "lower", group="of the bytes in form"),
    "whole": Metric("whole", "", "lower", group="of the bytes in form"),
    "publish_s": Metric("publish s", "s", "lower"),
    "apply_s": Metric("apply s", "s", "lower"),
    "mib": Metric("MiB of bf16 weights", "MiB", "lower"),
}


def fill(job: Job, part: Part) -> None:
    """Measure all learning rates in turn."""
    part.title = f"bf16 weights of a transformer of width {WIDTH} after {WARM_UP + 1} steps of AdamW"
    part.settings = {"width": WIDTH, "layers": LAYERS, "context": CONTEXT, "batch": BATCH, "steps": WARM_UP + 1}
    part.metrics = METRICS
    candidates = [
        Candidate(
            f"AdamW at {rate:g}", "headrace.bench.workloads.publish_adamw:measure", (rate, str(job.scratch / f"{rate}"))
        )
        for rate in RATES
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)


def _model() -> Any:
    import torch

    layer = torch.nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, dropout=0.0, batch_first=True)
    return torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(256, WIDTH),
            "positions": torch.nn.Embedding(CONTEXT, WIDTH),
            "layers": torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
            "head": torch.nn.Linear(WIDTH, 256),
        }
    )


def _text() -> Any:
    """Bytes of the modules of Python's standard library."""
    import numpy as np
    import torch

    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.from_numpy(np.frombuffer(b"".join(path.read_bytes() for path in modules), np.uint8).copy()).long()


def _train(model: Any, optimizer: Any, text: Any) -> None:
    """One step."""
    import torch

    starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,))
    samples = torch.stack([text[at : at + CONTEXT + 1] for at in starts.tolist()])
    inputs, targets = samples[:, :-1], samples[:, 1:]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
    hidden = model["embedding"](inputs) + model["positions"].weight
    output = model["head"](model["layers"](hidden, mask=mask, is_causal=True))
    optimizer.zero_grad()
    loss: Any = torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()


def measure(rate: float, folder: str) -> dict[str, float]:
    """Train, publish twice, and measure the second version."""
    import shutil

    import torch

    torch.manual_seed(0)
    model, text = _model(), _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(WARM_UP):
        _train(model, optimizer, text)
    try:
        return _publish_twice(model, lambda: _train(model, optimizer, text), Path(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish_twice(model: Any, train: Any, folder: Path) -> dict[str, float]:
    import torch

    from headrace.checkpoint import Checkpointer, Subscriber

    held = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in model.state_dict().items()}
    with Checkpointer(folder, run="r", sidecar=None) as checkpointer, Subscriber(folder, "policy") as subscriber:
        for step in (1, 2):
            before = {name: value.clone() for name, value in held.items()}
            if step == 2:
                train()
            checkpointer.save(step, {"model": model}).result()
            began = time.perf_counter()
            future = checkpointer.publish("policy", step, dtype=torch.bfloat16)
            assert future is not None
            record = future.result()
            published = time.perf_counter()
            subscriber.wait(60).apply(held)
            end = time.perf_counter()
        forms = _bytes_by_form(subscriber.store, record)
    if not all(torch.equal(held[name], value.bfloat16()) for name, value in model.state_dict().items()):
        raise AssertionError("the subscriber holds other weights")
    changed = sum(int((held[name].view(torch.int16) != before[name].view(torch.int16)).sum()) for name in held)
    stored = record.weights.size + (record.update.size if record.update else sum(forms.values()))
    return {
        "changed": changed / sum(value.numel() for value in held.values()),
        "published": stored / record.bytes,
        **{form: nbytes / record.bytes for form, nbytes in forms.items()},
        "publish_s": published - began,
        "apply_s": end - published,
        "mib": record.bytes / (1 << 20),
    }


def _bytes_by_form(store: Any, record: Any) -> dict[str, int]:
    """Stored bytes of the update's blocks, by the form that they are stored in."""
    from headrace.checkpoint.publishing.difference import SPARSE, WHOLE, XOR
    from headrace.checkpoint.publishing.updates import Update
    from headrace.checkpoint.publishing.weights import load_weights

    counts = Counter[int]()
    if record.update is not None:
        for row in Update(store, record, load_weights(store, record)).rows:
            counts[row.how] += row.stored
    return {"sparse": counts[SPARSE], "xor": counts[XOR], "whole": counts[WHOLE]}
