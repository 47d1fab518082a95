"""`headrace bench encodings`: bytes of a training state, by checkpoint encoding.

A small transformer trains with bf16 weights, fp32 masters and AdamW's moments. Its tensors, joined by kind, are encoded
by every codec that fits them, one chunk at a time, as a save does. The weights are also encoded as differences from
earlier steps.
Invariant: sizes are those of stored chunks, and every encoding is decoded and compared. The training is seeded, so
every round gives the same sizes. Only the seconds differ.
Failure behaviour: an encoding that does not decode to its input is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

from headrace.bench.core import command
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part
from headrace.checkpoint.format import codec
from headrace.checkpoint.format.manifest import DELTAS, PLANES, ZSTD
from headrace.dataio.core.cli import positive_int
from headrace.dataio.core.limits import MIB

CHUNK = 4 * MIB
AFTER = (1, 10, 40)
WEIGHTS, MASTERS = "weights, bf16", "masters, fp32"
METRICS = {
    "zstd": Metric("zstd, share of the bytes", "share"),
    "planes": Metric("bytes by place, then zstd, share", "share"),
    "planes_cpu_ms": Metric("CPU ms for 4 MiB", "ms"),
    **{f"after_{n}": Metric(f"difference from {n} steps before, share", "share") for n in AFTER},
}
KINDS = (WEIGHTS, MASTERS, "first moments, fp32", "second moments, fp32", "all of it")


def main(argv: Sequence[str]) -> int:
    """Run `headrace bench encodings` and return the exit code."""
    about = "Bytes of a state in training, by encoding."
    return command.run(argv, "encodings", about, fill, _options, rounds=1)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive_int, default=90, help="to train, more than 40 (default: %(default)s)")
    parser.add_argument("--width", type=positive_int, default=256, help="of the transformer (default: %(default)s)")


def fill(job: command.Job, part: Part) -> None:
    """Measure each kind of tensor in its own process, which trains the model."""
    steps, width = job.args.steps, job.args.width
    part.title = f"Encodings of a transformer's state after {steps} steps, width {width}"
    part.metrics, part.settings = METRICS, {"steps": steps, "width": width, "chunk_bytes": CHUNK}
    wanted = [Candidate(kind, "headrace.bench.workloads.encodings", (kind, str(steps), str(width))) for kind in KINDS]
    alternate(wanted, job.rounds, job.tell, part.candidates)


def train(steps: int, width: int) -> tuple[dict[str, bytes], dict[int, bytes]]:
    """Return the state by kind after `steps` steps, and the weights of earlier steps by their distance in steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    head, table = nn.Linear(width, 512), nn.Embedding(512, width)
    parameters = [*model.parameters(), *head.parameters(), *table.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    earlier = dict[int, bytes]()
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 512, (8, 33)) // torch.randint(1, 9, (8, 1))  # an uneven distribution of tokens
        found = head(model(table(tokens[:, :-1])))
        optimizer.zero_grad()
        nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if steps - step in AFTER:
            earlier[steps - step] = _bytes([p.detach().to(torch.bfloat16) for p in parameters])
    moments = [[optimizer.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq")]
    kinds = [[p.detach().to(torch.bfloat16) for p in parameters], [p.detach() for p in parameters], *moments]
    return dict(zip(KINDS, map(_bytes, kinds), strict=False)), earlier


def _bytes(tensors: Sequence[torch.Tensor]) -> bytes:
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def _planes(kind: str) -> int:
    width = 2 if kind == WEIGHTS else 4
    return next(code for code, found in PLANES.items() if found == width)


def encoded(data: bytes, code: int) -> tuple[int, float]:
    """Encode chunk by chunk. Return the stored bytes and the CPU seconds."""
    view, stored, seconds = memoryview(data), 0, 0.0
    for first in range(0, len(view), CHUNK):
        chunk, began = view[first : first + CHUNK], time.thread_time()
        made = codec.compress(chunk, code)
        seconds += time.thread_time() - began
        if codec.decompress(memoryview(made), code, len(chunk)) != chunk:
            raise AssertionError(f"codec {code} gives other bytes back")
        stored += min(len(made), len(chunk))
    return stored, seconds


def different(data: bytes, before: bytes) -> int:
    """Return the stored bytes of `data`, encoded as differences from `before`."""
    code = next(code for code, kind in DELTAS.items() if PLANES[kind] == 2)
    chunks = [slice(first, first + CHUNK) for first in range(0, len(data), CHUNK)]
    return sum(len(codec.compress_difference(data[one], before[one], code)) for one in chunks)


def measure(kind: str, steps: int, width: int) -> dict[str, float]:
    """Measure one kind of tensor, or the whole state with the smaller encoding of each kind."""
    state, earlier = train(steps, width)
    if kind == KINDS[-1]:
        whole = sum(map(len, state.values()))
        best = {name: min(encoded(data, ZSTD)[0], encoded(data, _planes(name))[0]) for name, data in state.items()}
        rest = sum(best.values()) - best[WEIGHTS]
        smallest = {n: min(best[WEIGHTS], different(state[WEIGHTS], old)) for n, old in earlier.items()}
        return {"planes": sum(best.values()) / whole} | {f"after_{n}": (rest + s) / whole for n, s in smallest.items()}
    data = state[kind]
    stored, seconds = encoded(data, _planes(kind))
    found = {"zstd": encoded(data, ZSTD)[0] / len(data), "planes": stored / len(data)}
    found["planes_cpu_ms"] = 1000 * seconds * CHUNK / len(data)
    if kind == WEIGHTS:
        found |= {f"after_{n}": different(data, old) / len(data) for n, old in earlier.items()}
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
