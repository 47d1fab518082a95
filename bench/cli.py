"""`headrace bench`: finds the benchmark and runs it.

Invariants: a benchmark is imported only when it is chosen, so `headrace bench --help` responds at once. Every benchmark
writes the same results document (`bench/core/results.py`), with raw samples. It prints only figures that were measured
in its run.

Failure behaviour: an unknown name is wrong use, with exit code 2.
"""

from __future__ import annotations

import importlib

from headrace.dataio.core.cli import Command
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import did_you_mean

COMMANDS: dict[str, tuple[str, str]] = {
    "all": ("workloads.all:all_", "a short version of everything in five minutes, with a report"),
    "store": ("workloads.store:store", "a bucket or directory by operation, size and concurrency, and other clients"),
    "pack": ("workloads.pack:pack", "packing, compared with webdataset's writer"),
    "loader": ("workloads.loader:loader", "batches of clips, sound or pictures, compared with other loaders"),
    "raw": ("workloads.raw:raw", "samples as bytes, checked, compared with a plain loop of preadv"),
    "latents": (
        "workloads.latents:latents",
        "latents, embeddings and captions, compared with other loaders and preadv",
    ),
    "media": (
        "workloads.media:media",
        "images and videos in one order, raw planes and files in place, each compared with the plain case",
    ),
    "ranges": ("workloads.ranges:ranges", "bytes and requests for short clips of long videos in place"),
    "lerobot": (
        "workloads.lerobot:lerobot",
        "two cameras, states and actions, compared with LeRobot's reader and Lance",
    ),
    "resume": ("workloads.resume:resume", "resuming in the middle of an epoch, compared with other loaders"),
    "checkpoint": (
        "workloads.checkpoint:checkpoint",
        "saves and restores, compared with torch.save and torch.distributed.checkpoint",
    ),
    "frequent": (
        "workloads.frequent:frequent",
        "a save after every step: the time it costs, and the steps that a kill loses",
    ),
    "publish": ("workloads.publish:publish", "new weights for a subscriber, compared with safetensors files"),
    "exchange": (
        "workloads.exchange:exchange",
        "exports, imports and copies of a step, compared with other tools for the same bytes",
    ),
    "sidecar": ("workloads.sidecar:sidecar", "throughput, latency and memory of the node's daemon"),
    "simulate": ("workloads.simulate:simulate", "a model of 8 to 16,384 GPUs: reading, checkpoints, goodput"),
    "report": ("core.report:report", "Markdown tables of results files"),
    "compare": ("core.compare:compare_files", "what changed between two results files beyond noise"),
}
"""The name of each benchmark → (module:command below `headrace.bench`, one line of help)."""

_EXIT_CODES = """\
Each has --rounds, --directory, -o FILE (raw samples and environment as JSON), --json, and its own options: see its --help.

exit codes: 0 all candidates ran · 1 one failed and is named · 130 interrupted · others as in headrace --help"""


def bench(argv: list[str]) -> int:
    """Run one benchmark; see `headrace bench --help`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        raise UsageError(f"no benchmark {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}", hint="see headrace bench --help")
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    chosen: Command = getattr(importlib.import_module(f"headrace.bench.{module}"), function)
    return chosen(argv[1:])


def usage() -> str:
    """Return the text of `headrace bench --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    head = "usage: headrace bench WHAT [OPTION ...]\n\nmeasure Headrace and its peers on this machine"
    return f"{head}\n\n{rows}\n\n{_EXIT_CODES}"
