"""`read` opens the contents of a step for notebooks and tools, without a state to restore into.

Invariant: tensors are read on access. The step is leased while the `SavedStep` is open. It stays open until it is
closed, or until it and all its tensors are garbage-collected. A slice reads only the chunks that hold it. Every chunk
is checked against its digest.

Failure behaviour: `NotFoundError` for a step or an entry that does not exist. `UsageError` for a read after `close`.
`CorruptionError` names step, tensor, pack and offset.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from headrace.checkpoint.format.chunking import Box, whole
from headrace.checkpoint.format.metadata import given
from headrace.checkpoint.repository import descriptions
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import chunk_reader, dcp_names
from headrace.checkpoint.restoring.chunk_reader import Saved, Want
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.build import plain
from headrace.checkpoint.state.tensors import TensorSink, empty
from headrace.checkpoint.state.tree import PartsNode, StatefulNode, TensorRef, ValueNode, join, tensor_names
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UsageError
from headrace.dataio.core.limits import check_memory
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store


class LazyTensor:
    """A saved tensor that is read on access: `t[...]` reads a part, and `t.read()` reads all of it.

    `name` is its name in the checkpoint, and `shape` the shape of the global tensor.
    """

    def __init__(self, step: SavedStep, saved: Saved) -> None:
        self._step, self._saved = step, saved
        self.name, self.shape = saved.name, torch.Size(saved.shape)
        self.dtype: torch.dtype = getattr(torch, saved.dtype)

    def read(self) -> torch.Tensor:
        """Read the whole tensor into main memory."""
        return self._read(whole(self._saved.shape))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Index like a tensor. Integers and slices read only their part. Any other index reads the whole tensor."""
        indices = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(i, (int, slice)) and not isinstance(i, bool) for i in indices) or len(indices) > len(
            self.shape
        ):
            return self.read()[index]
        ranges = [_range(i, n) for i, n in zip(indices, self.shape, strict=False)]
        ranges += [range(n) for n in self.shape[len(indices) :]]
        box = Box(tuple(self.shape), tuple(r.start if r else 0 for r in ranges), tuple(map(_extent, ranges)))
        inside = [0 if isinstance(i, int) else slice(None, None, i.step) for i in indices]
        return self._read(box)[tuple(inside)]

    def __repr__(self) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    def _read(self, box: Box) -> torch.Tensor:
        check_memory(math.prod(box.local) * self.dtype.itemsize, f"a tensor of shape {list(box.local)}")
        return self._step._read(self._saved, box, empty(self.dtype, box.local))


def _range(index: int | slice, size: int) -> range:
    if isinstance(index, slice):
        return range(*index.indices(size))
    if not -size <= index < size:
        raise IndexError(f"index {index} of {size} elements")
    return range(index % size, index % size + 1)


def _extent(chosen: range) -> int:
    if chosen.step < 0:
        raise UsageError("a slice with a negative step cannot be read", hint="read it forwards and flip it")
    return chosen[-1] + 1 - chosen.start if chosen else 0


class SavedStep(Mapping[str, Any]):
    """The entries of a step by path ("model/embed.weight"). They are `LazyTensor` objects or plain values.

    Close it, or use it in a `with`.
    """

    def __init__(self, store: Store, step: Step, rank: int) -> None:
        self._store, self._opened, self.step = store, step, step.base.step
        manifest = step.manifests[rank if rank < len(step.manifests) else 0]
        saved, document = chunk_reader.tensors_of(step, rank), tree.decode(manifest.tree)
        if dcp_names.is_dcp(document):
            document, saved = dcp_names.state_of(step, rank)
        self._entries = {
            path: _named(saved, node.name) if isinstance(node, TensorRef) else node
            for path, node in _entries(document, "")
        }
        self._close: Callable[[], object] = lambda: None
        self._closed = False

    @property
    def metadata(self) -> dict[str, int | float | bool | str | None]:
        """The metadata that the step was saved with."""
        return given(self._opened.manifests[0].metadata)

    @property
    def description(self) -> dict[str, Any]:
        """The description of the run at the step, by section; empty if none was stored."""
        return descriptions.read(self._store, self._opened.run, self._opened.manifests[0].description) or {}

    def keep(self, stack: contextlib.ExitStack) -> Self:
        """Close `stack` together with this step, also when the step is garbage-collected."""
        self._close = Finalizer(self, stack.close)
        return self

    def __getitem__(self, path: str) -> Any:
        if path not in self._entries:
            raise NotFoundError(f"step {self.step} has no entry {path!r:.200}", hint="list(saved) names all entries")
        entry = self._entries[path]
        return LazyTensor(self, entry) if isinstance(entry, Saved) else plain(entry, path)

    def is_tensor(self, path: str) -> bool:
        """Whether the entry is a tensor. Its value is not built."""
        return isinstance(self._entries.get(path), Saved)

    def __contains__(self, path: object) -> bool:
        return path in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Release the step's lease."""
        self._closed = True
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _read(self, saved: Saved, box: Box, target: torch.Tensor) -> torch.Tensor:
        if self._closed:
            raise UsageError(f"step {self.step} was closed", hint="read tensors inside the `with`")
        chunk_reader.read(self._store, self._opened, [Want(saved, box, TensorSink(target))])
        return target


def read(
    url: str | os.PathLike[str] | Store,
    *,
    run: str,
    step: int | str = "latest",
    tag: str | None = None,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> SavedStep:
    """Open a step to inspect its contents, without a state to restore into. Any rank may call it alone.

    Args:
        url (str | os.PathLike[str] | Store): The repository: a path, `s3://bucket/prefix`, or an open `Store`.
        run (str): The run's name.
        step (int | str): A step's number, or "latest". Default: "latest".
        tag (str | None): The tag of a step, instead of `step`. Default: None.
        rank (int): The rank whose rank-local values are shown. Default: 0.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Returns:
        SavedStep: A mapping from paths ("model/embed.weight") to `LazyTensor` or plain values. Use it in a `with`.

    Raises:
        NotFoundError: The run, the step or the tag does not exist.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer
        >>> folder = tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     _ = checkpointer.save(1, {"weight": torch.arange(4)}).result(timeout=60)
        >>> with read(folder, run="exp42") as saved:
        ...     saved["weight"][1:3]
        tensor([1, 2])
    """
    with contextlib.ExitStack() as stack:
        store = url if isinstance(url, Store) else stack.enter_context(open_store(url, storage_options=storage_options))
        base = repository.find(store, run, repository.step_or_tag(step, tag))
        if base is None:
            raise repository.missing(store, run)
        opened = stack.enter_context(chunk_reader.LeasedStep(store, run, base))
        saved_step = SavedStep(store, opened, rank)
        return saved_step.keep(stack.pop_all())


def _named(saved: Mapping[str, Saved], name: str) -> Saved:
    if name not in saved:
        raise CorruptionError(f"the checkpoint refers to tensor {name!r:.200}, which it does not hold")
    return saved[name]


def _entries(node: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, StatefulNode):
        yield from _entries(node.state, path)
    elif isinstance(node, PartsNode):
        yield from _entries(node.parts, path)
    elif isinstance(node, ValueNode) and any(True for _ in tensor_names(node)):
        yield from _entries(node.value, path)
    elif isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _entries(value, join(path, key))
    elif isinstance(node, (list, tuple)) and node:
        for i, value in enumerate(node):
            yield from _entries(value, join(path, i))
    else:
        yield path, node
