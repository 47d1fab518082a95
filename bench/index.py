"""What a large index costs: opening, asking and reading, beside pyarrow and DuckDB on the same files.

Purpose: `headrace bench index --samples 10000000` makes a synthetic index of that many rows
(`headrace.bench.index_scale`) and runs every
candidate in a process of its own. With `--directory` the index is kept there, and used again.
Invariant: a candidate measures itself, and `peak_mib` is its whole process; all must find the same number of samples.
Failure behaviour: a candidate that fails is named with its last words; the others go on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrace.bench.core import command
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.options import count

CANDIDATES = ("headrace", "pyarrow.read_table", "pyarrow.dataset", "duckdb")
METRICS = {
    "open_s": Metric("open, and count, s", "s"),
    "opened_peak_mib": Metric("peak memory once open, one sample read, MiB", "MiB"),
    "where_s": Metric("`where` of three columns with ilike, s", "s"),
    "first_sample_s": Metric("first sample by number, s", "s"),
    "sample_anywhere_median_s": Metric("a sample anywhere, median, s", "s"),
    "sample_anywhere_p99_s": Metric("a sample anywhere, 99 %, s", "s"),
    "batch_median_s": Metric("64 samples anywhere in an index just opened, median, s", "s"),
    "sample_near_median_s": Metric("a sample of a run of eight whose page is held, s", "s"),
    "one_column_s": Metric("one column of all samples, s", "s"),
    "find_last_s": Metric("find the last sample by its key, s", "s"),
    "peak_mib": Metric("peak memory after all of it, MiB", "MiB"),
}


def main(argv: Sequence[str]) -> int:
    """`headrace bench index`."""
    return command.run(argv, "index", "What a large index costs, beside pyarrow and DuckDB.", fill, _options, rounds=1)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=count, default=1_000_000, help="rows of the index (default: %(default)s)")


def fill(job: command.Job, part: Part) -> None:
    """One index for all candidates."""
    from headrace.bench.index_scale import make
    from headrace.dataio.shards.versions.documents import version_key

    where = job.args.directory / f"index-{job.args.samples}" if job.args.directory else job.scratch
    if not (where / "versions").exists():
        make(where, job.args.samples)
    size = sum(path.stat().st_size for path in (where / "index").iterdir())
    document = (where / version_key(1)).stat().st_size
    part.title = f"A large index: {job.args.samples:,} samples, {size / 2**20:.0f} MiB, page cache warm"
    part.settings = {"samples": job.args.samples, "index_bytes": size, "document_bytes": document}
    part.metrics, part.against = METRICS, "duckdb"
    wanted = [Candidate(name, "headrace.bench.index_scale", (name, str(where))) for name in CANDIDATES]
    alternate(wanted, job.rounds, job.tell, part.candidates, seconds=1800)
    _require_equal(part)


def _require_equal(part: Part) -> None:
    """What they counted is no figure, but must be the same for all."""
    for counted in ("samples", "where_samples"):
        found = {name: set(one.metrics.pop(counted, [])) for name, one in part.candidates.items()}
        if len(set[float]().union(*found.values())) > 1:
            raise AssertionError(f"the candidates found different numbers of samples: {found}")
    for one in part.candidates.values():
        one.metrics = {name: values for name, values in one.metrics.items() if name in METRICS}
