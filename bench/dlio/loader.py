"""DLIO's `data_loader_classname`: batches of a Headrace dataset, in Headrace's order, by the sidecar where one answers.

Invariant: each rank gets its share of every epoch; bytes are checked against the index. The epoch advances with every
pass, so the order differs from epoch to epoch, as `sample_shuffle` asks of a loader. Failure behaviour: without a dataset
a `UsageError` says how to make one; errors of the loader end the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

from headrace.bench.dlio.prepare import place_of
from headrace.bench.mlperf.raw import batches
from headrace.dataio.core.errors import UsageError


class HeadraceDataLoader(BaseDataLoader):  # type: ignore[misc,unused-ignore]
    """One loader for each of DLIO's two datasets."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._epoch = 0
        self._url = ""

    def read(self) -> None:
        """Find the dataset."""
        folder, kind = Path(self._args.data_folder), str(self.dataset_type)
        kind = "valid" if "valid" in kind.lower() else "train"
        place = place_of(folder, kind)
        if not (place / "dataset.json").exists():
            raise UsageError(f"{place} holds no dataset", hint=f"run: python -m headrace.bench.dlio.prepare {folder}")
        self._url = str(place)

    def next(self) -> Iterator[list[bytearray]]:
        """The batches of one epoch, this rank's samples as bytes in host memory."""
        args = self._args
        self._epoch += 1
        return batches(
            self._url, self.batch_size, rank=args.my_rank, ranks=args.comm_size, epoch=self._epoch, seed=args.seed
        )

    def finalize(self) -> None:
        """Nothing outlives an epoch."""
