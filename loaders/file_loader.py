"""`FileLoader`: batches of files as they are stored, for whoever decodes them: latents, features, tokens, other
formats.

Purpose: check what is asked for and put plan and work together; `headrace.loaders.loader` does the rest.
Invariants: those of the engine.
Failure behaviour: `NotFoundError`, `AccessDeniedError`, `UsageError` before anything is started; while iterating, the
engine's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import arguments
from headrace.loaders.common import Asked, Common, explicit
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import Loader
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.works.files import BYTES, SIZES, FileWork

MAX_FILES = 64

if TYPE_CHECKING:
    from headrace.loaders.sampling.mixture import Mixture


@explicit
class FileLoader(Loader):
    """Batches of the `files` of each sample, named by their extensions, such as `["npy", "json"]`, as they are stored.

    Samples that have not all of them are left out. Every file is compared with its digest; what is in it is looked at
    by nobody. All else is as in `loaders.VideoLoader`, but for `transform` and `isolate`, which need something decoded.

    A batch is a dict: "bytes" uint8 (N,), all files of the batch one after the other, sample by sample, in the order of
    `files`; "sizes" int64 (B, F), the bytes of each, so `batch["bytes"].split(batch["sizes"].flatten().tolist())` are
    the files; "id" int64 (B,); "key" and "text" lists; and the columns.

    Raises `NotFoundError`, `AccessDeniedError`, `UsageError` here; while iterating, the errors of
    `headrace.loaders.batch.sample_builder`.
    """

    def __init__(
        self,
        url_or_dataset: str | os.PathLike[str] | Dataset | Mixture,
        batch_size: int | None = None,
        *,
        files: Sequence[str],
        **common: Unpack[Common],
    ) -> None:
        asked = Asked.of(self, common)
        names = _checked(files)
        if asked.transform is not None or asked.isolate:
            raise UsageError(
                "FileLoader decodes nothing: there is nothing to transform or isolate",
                hint="work on the batches; VideoLoader and AudioLoader decode",
            )
        for name in asked.columns:
            if name in (BYTES, SIZES):
                raise UsageError(
                    f"columns cannot hold {name!r}: batches have something of that name", hint="leave it out"
                )
        output = arguments.output(asked.device, None)
        delivery = asked.delivery(output, group=1)
        parts = -(-delivery.threads // (1 + delivery.prefetch))  # so many threads for each batch that is in the making
        each = -(-(batch_size or 1) // parts)

        def work() -> Processor:
            return asked.finished(FileWork(names), None, output.device, made.names)

        made, owned = asked.planned(
            url_or_dataset, lambda dataset: (holding(dataset, names), 1), ["files", *names], asked.sampling(batch_size)
        )
        super().__init__(made, work, replace(delivery, group=each), asked.refusing, owned)


def holding(dataset: Dataset, files: Sequence[str]) -> I64:
    """The numbers of the samples that have files of all these extensions."""
    if len(dataset) and dataset.index.files_of_all.issuperset(files):
        return np.arange(len(dataset), dtype=np.int64)
    from headrace.dataio.shards.index import (
        kernels as pc,  # with Arrow, which reading files that all samples have does without
    )
    from headrace.dataio.shards.index import rows

    found, start, there = list[I64](), 0, set[str]()
    for table in dataset.index.tables(["members"]):
        for members in table["members"].chunks:
            has = np.stack([rows.holding(members, ext) for ext in files])
            there |= set(pc.unique(pc.struct_field(pc.list_flatten(members), ["ext"])).to_pylist())
            found.append(np.flatnonzero(has.all(axis=0)) + start)
            start += len(members)
    ids: I64 = np.concatenate([np.empty(0, np.int64), *found])
    if not len(ids):
        wanted = ", ".join(f".{ext}" for ext in files)
        raise UsageError(
            f"{dataset.url} has no sample with {wanted}",
            hint=f"there are: {', '.join(f'.{ext}' for ext in sorted(there)[:MAX_FILES]) or 'no files'}",
        )
    return ids


def _checked(files: Any) -> list[str]:
    if isinstance(files, str) or not isinstance(files, Sequence) or not 1 <= len(files) <= MAX_FILES:
        raise UsageError(f"files={files!r:.200} is no list of extensions", hint='give files=["npy", "json"]')
    names = [name.removeprefix(".") if isinstance(name, str) else name for name in files]
    for name in names:
        if not isinstance(name, str) or not name:
            raise UsageError(f"files cannot hold {name!r}", hint='give extensions, such as "npy"')
    if len(set(names)) < len(names):
        raise UsageError("files names one extension twice", hint="name each once")
    return names
