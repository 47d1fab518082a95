"""List and read the artifacts of a step: files that `Checkpointer.put_artifact` stored with it.

Invariant: every byte that is returned was checked against the digest of its chunk. A lease protects the step while it is
read. Reading needs no torch.
Failure behaviour: `NotFoundError` for a step or an artifact that does not exist; `CorruptionError` names artifact, pack
and offset.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint.format import artifacts
from headrace.checkpoint.format.manifest import Chunk, Manifest, Tensor
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring.chunk_reader import LeasedStep
from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.core.limits import check_memory
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of a step. `rank`: the rank that gave it. `bytes`: its size."""

    name: str
    rank: int
    bytes: int


def artifacts_of(step: Step) -> list[Artifact]:
    """The artifacts of an open step, by name and rank."""
    found = [
        Artifact(name, manifest.rank, tensor.nbytes)
        for manifest in step.manifests
        for name, tensor in artifacts.of_manifest(manifest)
    ]
    return sorted(found, key=lambda each: (each.name, each.rank))


@contextlib.contextmanager
def open_leased(store: Store, run: str, step: int | str) -> Iterator[Step]:
    """The step with its manifests, under a lease. `step`: as `steps.find` takes it."""
    base = repository.find(store, run, step)
    if base is None:
        raise repository.missing(store, run)
    with LeasedStep(store, run, base) as opened:
        yield opened


def read_artifact(
    url: str | os.PathLike[str] | Store,
    *,
    run: str,
    name: str,
    step: int | str = "latest",
    tag: str | None = None,
    rank: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> bytes:
    """Read a file that was stored with a step by `Checkpointer.put_artifact`.

    Args:
        url (str | os.PathLike[str] | Store): The repository: a path, `s3://bucket/prefix`, or an open `Store`.
        run (str): The run's name.
        name (str): The artifact's name.
        step (int | str): A step's number, or "latest". Default: "latest".
        tag (str | None): The tag of a step, instead of `step`. Default: None.
        rank (int | None): The rank that gave it. Default: None, the lowest rank that gave an artifact of this name.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Returns:
        bytes: The file.

    Raises:
        NotFoundError: The run, the step, the tag or the artifact does not exist.
        CorruptionError: Stored bytes are damaged.

    Example:
        >>> import tempfile
        >>> from headrace.checkpoint import Checkpointer
        >>> folder = tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     _ = checkpointer.put_artifact(1, "config.yaml", b"lr: 0.001")
        ...     _ = checkpointer.save(1, {"epoch": 3}).result(timeout=60)
        >>> read_artifact(folder, run="exp42", step=1, name="config.yaml")
        b'lr: 0.001'
    """
    with contextlib.ExitStack() as stack:
        store = url if isinstance(url, Store) else stack.enter_context(open_store(url, storage_options=storage_options))
        opened = stack.enter_context(open_leased(store, run, repository.step_or_tag(step, tag)))
        return bytes(read_bytes(store, opened, name, rank))


def read_bytes(store: Store, step: Step, name: str, rank: int | None = None) -> bytearray:
    """The artifact's bytes."""
    manifest, tensor = find(step, name, rank)
    check_memory(tensor.nbytes, f"artifact {name!r}")
    data = bytearray(tensor.nbytes)

    def write(at: int, part: memoryview) -> None:
        data[at : at + len(part)] = part

    _read(store, step, manifest, tensor, write)
    return data


def save_as(store: Store, step: Step, name: str, target: Path, rank: int | None = None) -> int:
    """Write the artifact into the file `target`, which appears when it is complete. Returns its size in bytes."""
    manifest, tensor = find(step, name, rank)
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        with open(part, "xb") as file:
            _read(store, step, manifest, tensor, lambda at, data: _write_at(file.fileno(), at, data))
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return tensor.nbytes


def _write_at(fd: int, at: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        at, data = at + count, data[count:]


def find(step: Step, name: str, rank: int | None) -> tuple[Manifest, Tensor]:
    """The artifact's tensor, and the manifest that lists it."""
    artifacts.check_name(name)
    for manifest in step.manifests:
        for each, tensor in artifacts.of_manifest(manifest):
            if each == name and rank in (None, manifest.rank):
                return manifest, tensor
    others = sorted({each.name for each in artifacts_of(step)})
    more = ", ..." if len(others) > _SHOWN else ""
    raise NotFoundError(
        f"step {step.base.step} of run {step.run} has no artifact {name!r}" + (f" of rank {rank}" if rank else ""),
        hint=f"it has: {', '.join(others[:_SHOWN])}{more}" if others else "it has no artifacts",
    )


def _read(
    store: Store, step: Step, manifest: Manifest, tensor: Tensor, write: Callable[[int, memoryview], None]
) -> None:
    """Read the tensor's chunks and pass their parts to `write(at, bytes)`, from several threads."""
    parts: dict[bytes, list[tuple[int, int, int]]] = defaultdict(list)
    needed: dict[str, dict[bytes, Chunk]] = defaultdict(dict)
    at = 0
    for span in tensor.spans:
        chunk = manifest.chunks[span.chunk]
        parts[chunk.digest].append((at, span.start, span.length))
        needed[manifest.packs[chunk.pack].key][chunk.digest] = chunk
        at += span.length

    def use(pack: str, chunk: Chunk, payload: memoryview | None) -> None:
        if payload is None:
            raise CorruptionError(
                f"step {step.base.step} of run {step.run}: {tensor.name}: the bytes at offset {chunk.offset} of {pack}"
                " are damaged or missing",
                hint="run `headrace ckpt check`",
            )
        for place, start, length in parts[chunk.digest]:
            write(place, payload[start : start + length])

    work = (batch for key in sorted(needed) for batch in fetch.batches(key, needed[key].values()))
    fetch.fetch(store, work, use)
