"""Makes a dataset of plain files: it puts them into tar shards and indexes the shards in place.

Invariant: a sample holds the bytes of its files. Failure behaviour: errors of the file system are raised.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from headrace.dataio.core.limits import MIB

SHARD_BYTES = 64 * MIB


def tar_shards(files: Path, folder: Path) -> str:
    """Put all of `files` into tars of about `SHARD_BYTES` in `folder`/shards, and index them.

    Returns:
        The path of the dataset, `folder`/dataset.
    """
    from headrace.dataio import index

    (folder / "shards").mkdir(parents=True, exist_ok=True)
    for number, members in enumerate(_groups(sorted(files.iterdir()))):
        with tarfile.open(folder / "shards" / f"{number:06d}.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            for path in members:
                tar.add(path, path.name)
    index([str(folder / "shards")], str(folder / "dataset"), strict=True).close()
    return str(folder / "dataset")


def _groups(paths: list[Path]) -> list[list[Path]]:
    """Split the files, in order, into the groups that make a shard each."""
    groups, size = list[list[Path]](), SHARD_BYTES
    for path in paths:
        if size >= SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    return groups
