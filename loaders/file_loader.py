"""`FileLoader`: batches of files as they are stored, such as latents, features and tokens.

Purpose: deliver files that the trainer decodes itself. This module checks the options, and creates the plan and the
processor. `FileProcessor` verifies the files and does not decode them. `headrace.loaders.loader` does the rest.
Invariants: those of `headrace.loaders.loader`. The bytes of a sample are those of its files, in the requested order.
Failure behaviour: the constructor raises `NotFoundError`, `AccessDeniedError` or `UsageError` before it starts
anything. Iteration raises the errors of `headrace.loaders.loader`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import Files, Sample
from headrace.loaders.config import LoaderConfig, configured_by
from headrace.loaders.fetch.sample_reader import files_of
from headrace.loaders.interfaces import FetchedSample, Needs, ProcessedSample, Processor, SampleLayout, SampleRef
from headrace.loaders.loader import BaseLoader
from headrace.loaders.sampling.columns import HasFiles
from headrace.loaders.sampling.left_out import samples_with_all

if TYPE_CHECKING:
    from headrace.loaders.sampling.mixture import Mixture

MAX_FILES = 64
BYTES, SIZES = "bytes", "sizes"
_IN_PLACE = {BYTES: torch.empty(0, dtype=torch.uint8)}


class FileProcessor:
    """Returns "bytes", uint8 (n,), and "sizes", the number of bytes of each file."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = tuple(files)
        self._needs: Needs = dict.fromkeys(files)

    @property
    def layout(self) -> SampleLayout:
        return SampleLayout((BYTES,), {SIZES: torch.int64}, files_of=self._files_of)

    def needs(self, ref: SampleRef) -> Needs:
        return self._needs

    def cost(self, sample: Sample) -> int:
        return 0

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        return [self._one(one) for one in fetched]

    def close(self) -> None:
        pass

    def _one(self, fetched: FetchedSample) -> ProcessedSample:
        if fetched.files is not None:
            sizes = [member.length for member in fetched.files.members]
            return ProcessedSample(fetched.ref.sample, _IN_PLACE, {SIZES: sizes}, in_place=True)
        views = [np.frombuffer(fetched.media[ext][:], np.uint8) for ext in self._files]
        tensor = torch.from_numpy(np.concatenate(views))
        return ProcessedSample(fetched.ref.sample, {BYTES: tensor}, {SIZES: [len(view) for view in views]})

    def _files_of(self, sample: Sample) -> Files:
        return files_of(sample, self._files)


@dataclass(frozen=True)
class FileConfig(LoaderConfig):
    """The options that `FileLoader` adds to those of `LoaderConfig`.

    Args:
        url_or_dataset (str | os.PathLike | Dataset | Mixture): URL or directory of a dataset, an open dataset, or a
            mixture.
        batch_size (int): samples in a rank's batch.
        files (Sequence[str]): extensions of the files to deliver of each sample, such as `["npy", "json"]`. Samples
            that lack one of these files are left out. The log says how many.
    """

    url_or_dataset: str | os.PathLike[str] | Dataset | Mixture
    batch_size: int | None = None
    _: KW_ONLY
    files: Sequence[str] = field()


class FileLoader(BaseLoader):
    """Batches of files as they are stored. The loader verifies the checksum of every file and does not parse it.

    Yields:
        A dict:

        - "bytes": uint8 (N,), all files of the batch concatenated, sample by sample, in the order of `files`.
        - "sizes": int64 (B, F), size of each file in bytes. `batch["bytes"].split(batch["sizes"].flatten().tolist())`
          returns the files.
        - "id": int64 (B,), the samples' ids. "key" and "text": lists.
        - Each of `columns`: a list.

    Args:
        The arguments are those of `FileConfig` and `LoaderConfig`; `help(FileLoader.__init__)` lists them. `transform`
        and `decode_in_subprocess` cannot be used, since nothing is decoded.

    Raises:
        NotFoundError, AccessDeniedError, UsageError: when the loader is created.
        CorruptionError: while iterating, if too many samples are damaged, or a sample and all its substitutes.
        HeadraceError: while iterating, for errors of the store.

    Example:
        >>> loader = FileLoader(clips, batch_size=2, files=["mp4"])
        >>> batch = next(iter(loader))
        >>> int(batch["sizes"].sum()) == len(batch["bytes"])
        True
        >>> loader.close()
    """

    @configured_by(FileConfig)
    def __init__(self, config: FileConfig) -> None:
        names = _extensions(config.files)
        if config.transform is not None or config.decode_in_subprocess:
            raise UsageError(
                "FileLoader decodes nothing, so there is nothing to transform or to decode in a subprocess",
                hint="work on the batches; VideoLoader and AudioLoader decode",
            )
        for name in config.columns:
            if name in (BYTES, SIZES):
                raise UsageError(
                    f"columns cannot hold {name!r}: batches have an entry of that name", hint="leave it out"
                )
        output = config.output()
        delivery = config.delivery(output, group=1)
        threads = -(-delivery.num_threads // (1 + delivery.prefetch_batches))  # for each batch in preparation
        delivery = replace(delivery, group=-(-(config.batch_size or 1) // threads))

        def start_processor() -> Processor:
            return config.finish(FileProcessor(names), None, output.device, plan.names)

        plan, owned = config.open_plan(
            config.url_or_dataset,
            lambda dataset: (samples_with_all(dataset, [HasFiles((name,)) for name in names]), 1),
            ["files", *names],
            config.sampling(config.batch_size),
        )
        super().__init__(plan, start_processor, delivery=delivery, bad_samples=config.bad_samples, owned=owned)


def _extensions(files: Any) -> list[str]:
    if isinstance(files, str) or not isinstance(files, Sequence) or not 1 <= len(files) <= MAX_FILES:
        raise UsageError(f"files={files!r:.200} is not a list of extensions", hint='give files=["npy", "json"]')
    names = [name.removeprefix(".") if isinstance(name, str) else name for name in files]
    for name in names:
        if not isinstance(name, str) or not name:
            raise UsageError(f"files cannot hold {name!r}", hint='give extensions, such as "npy"')
    if len(set(names)) < len(names):
        raise UsageError("files names one extension twice", hint="name each once")
    return names
