"""Check tensors of the state that share memory: a step must hold the same content for all of them.

A tied model can be restored from a step in which the weights were not tied, if they were equal. Only tensors that share
memory and have different names in the step are compared. Their chunks' digests usually decide. Otherwise, the contents
are read into temporary memory and compared.

Invariant: this module does not change the state.

Failure behaviour: `MismatchError` names two tensors whose shared memory would receive different contents, or a tensor
whose own elements share memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import msgspec
import torch

from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.chunk_reader import Saved, Want
from headrace.checkpoint.state import tensors
from headrace.checkpoint.state.tensors import TensorSink, as_bits, empty, name_of
from headrace.dataio.core.errors import MismatchError
from headrace.dataio.store.base import Store

_ALIGN = 16
"""Bytes of the widest element."""


class Target(msgspec.Struct, frozen=True, gc=False):
    """A tensor at `path` in the state. It is to receive the elements `box` of a saved tensor."""

    path: str
    saved: Saved
    box: Box
    tensor: torch.Tensor


def require_one_content(store: Store, step: Step, targets: Sequence[Target]) -> None:
    """Raise `MismatchError` if some memory would receive two different contents."""
    by_storage: dict[Hashable, list[Target]] = defaultdict(list)
    for target in targets:
        if not target.tensor.is_contiguous() and any(
            n > 1 and stride == 0 for n, stride in zip(target.tensor.shape, target.tensor.stride(), strict=True)
        ):
            raise MismatchError(f"{target.path}: elements of this tensor share memory", hint="clone() it first")
        if (storage := tensors.storage_of(target.tensor)) is not None:
            by_storage[storage].append(target)
    for sharing in by_storage.values():
        if len(sharing) == 1:  # nearly always, so the byte ranges are computed for the others only
            continue
        for group in tensors.overlapping((target, tensors.byte_range(target.tensor)) for target in sharing):
            of_several = len({each.saved.name for each in group}) > 1
            if of_several and not _same_chunks(group):
                _compare(store, step, group)


def _same_chunks(group: Sequence[Target]) -> bool:
    """Whether all targets are the same view, and the step's digests show that it holds the same bytes for them."""
    looks = {(*_look(target.tensor), target.box, target.saved.dtype) for target in group}
    return len(looks) == 1 and all(_chunks(each.saved) == _chunks(group[0].saved) for each in group[1:])


def _look(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _chunks(saved: Saved) -> list[tuple[object, ...]]:
    shards = []
    for manifest, tensor in saved.shards:
        spans = tuple((manifest.chunks[span.chunk].digest, span.start, span.length) for span in tensor.spans)
        shards.append((tensor.offset, tensor.local, spans))
    return sorted(shards)


def _compare(store: Store, step: Step, group: Sequence[Target]) -> None:
    """Write all targets into temporary memory of the same layout. Then compare each with the bytes in that memory."""
    reaches = [tensors.byte_range(target.tensor) or (0, 0) for target in group]
    start = min(begin for begin, _ in reaches) // _ALIGN * _ALIGN
    memory = tensors.empty_like("uint8", (max(end for _, end in reaches) - start,))
    read = [empty(target.tensor.dtype, tuple(target.tensor.shape)) for target in group]
    with torch.no_grad():
        wants = (
            Want(t.saved, t.box, TensorSink(piece, getattr(torch, t.saved.dtype)))
            for t, piece in zip(group, read, strict=True)
        )
        chunk_reader.read(store, step, list(wants))
        places = [_place(memory, target.tensor, start) for target in group]
        for place, piece in zip(places, read, strict=True):
            _bits(place).copy_(_bits(piece))
        for target, place, piece in zip(group, places, read, strict=True):
            if not torch.equal(_bits(place), _bits(piece)):
                raise _different(target, group)


def _place(memory: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    offset = int(tensor.storage_offset()) * tensor.element_size() - start
    return tensors.view_of(memory, name_of(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), offset)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that a NaN equals itself."""
    return as_bits(torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor)


def _different(target: Target, group: Sequence[Target]) -> MismatchError:
    other = next(each for each in reversed(group) if each is not target)
    return MismatchError(
        f"{target.path} and {other.path} share memory in the state, but have different contents in the checkpoint",
        hint="the state is unchanged; build it as it was when it was saved, or exclude one of them",
    )
