"""`python -m headrace.bench.workloads.dlio DATA_FOLDER`: makes datasets of the files that DLIO generated.

It packs `DATA_FOLDER/train/*` into `DATA_FOLDER/headrace/train` (tar shards and an index), and `valid` in the same way.
The files stay, because DLIO counts them.

Invariant: each file is one sample, with the file's bytes.

Failure behaviour: a folder without files is a `UsageError`. An existing dataset stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.core.data import tar_shards
from headrace.dataio.core.errors import HeadraceError, UsageError

PLACE = "headrace"


def place_of(folder: Path, kind: str) -> Path:
    """Return the path of the dataset of `train` or `valid`."""
    return folder / PLACE / kind / "dataset"


def prepare(folder: Path) -> list[str]:
    """Make the datasets that are missing, and return their paths."""
    kinds = [kind for kind in ("train", "valid") if (folder / kind).is_dir() and any((folder / kind).iterdir())]
    if not kinds:
        raise UsageError(
            f"{folder} has no train/ with files", hint="run DLIO with ++workload.workflow.generate_data=True first"
        )
    datasets = []
    for kind in kinds:
        if not (place_of(folder, kind) / "dataset.json").exists():
            datasets.append(tar_shards(folder / kind, folder / PLACE / kind))
    return datasets


def main(argv: Sequence[str]) -> int:
    """Prepare the folder that the command line names."""
    if len(argv) != 1:
        print("usage: python -m headrace.bench.workloads.dlio DATA_FOLDER", file=sys.stderr)
        return 2
    try:
        datasets = prepare(Path(argv[0]))
    except HeadraceError as error:
        print(f"headrace.bench.workloads.dlio: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(datasets) if datasets else "nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
