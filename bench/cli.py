"""`headrace bench`: finds the benchmark and runs it.

Invariant: nothing of a benchmark is imported before it is chosen, so `headrace bench --help` answers at once. Every
benchmark writes the same results document (`bench/core/results.py`), with raw samples, and prints no figure that was not
measured in its run. Failure behaviour: an unknown name is wrong use, exit code 2.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from headrace.dataio.core.errors import UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    "all": ("headrace.bench.workloads.all:main", "a short version of everything in five minutes, with a report"),
    "store": (
        "headrace.bench.workloads.store:main",
        "a bucket or directory by operation, size and concurrency, compared with other clients",
    ),
    "pack": ("headrace.bench.workloads.pack:main", "packing, compared with tar + ffprobe and webdataset's writer"),
    "loader": (
        "headrace.bench.workloads.loader:main",
        "batches of clips, sound or pictures, compared with other loaders",
    ),
    "raw": ("headrace.bench.workloads.raw:main", "samples as bytes, checked, compared with a plain loop of preadv"),
    "resume": (
        "headrace.bench.workloads.resume:main",
        "resuming in the middle of an epoch, compared with other loaders",
    ),
    "checkpoint": (
        "headrace.bench.workloads.checkpoint:main",
        "saves and restores, compared with torch.save and torch.distributed.checkpoint",
    ),
    "sidecar": ("headrace.bench.workloads.sidecar:main", "throughput, latency and memory of the node's daemon"),
    "tier": (
        "headrace.bench.workloads.tier:main",
        "restoring from the node's tier, the buddy and a store with limited bandwidth",
    ),
    "encodings": (
        "headrace.bench.workloads.encodings:main",
        "bytes of a training state, by checkpoint encoding",
    ),
    "pieces": ("headrace.bench.workloads.pieces:main", "the cost of single steps: one clip, one probe, one digest"),
    "index": (
        "headrace.bench.workloads.index:main",
        "opening, querying and reading a large index, compared with pyarrow and DuckDB",
    ),
    "simulate": ("headrace.bench.simulate.cli:main", "a model of 8 to 16,384 GPUs: reading, checkpoints, goodput"),
    "report": ("headrace.bench.report.cli:report", "an HTML page or Markdown tables of results files"),
    "compare": ("headrace.bench.report.cli:compare_", "what changed between two results files beyond noise"),
}
"""Benchmark → (module:function, one line of help). The function takes the remaining arguments and returns an exit code."""

_EXIT_CODES = """\
Each has --rounds, --directory, -o FILE (raw samples and environment as JSON), --json, and its own options: see its --help.

exit codes: 0 all candidates ran · 1 one failed and is named · 130 interrupted · others as in headrace --help"""


def bench(argv: list[str]) -> int:
    """Run one benchmark; see `headrace bench --help`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        raise UsageError(f"no benchmark {argv[0]!r}", hint="see headrace bench --help")
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    chosen: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return chosen(argv[1:])


def usage() -> str:
    """The text of `headrace bench --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    head = "usage: headrace bench WHAT [OPTION ...]\n\nmeasure Headrace and its peers on this machine"
    return f"{head}\n\n{rows}\n\n{_EXIT_CODES}"
