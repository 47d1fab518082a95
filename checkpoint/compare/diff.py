"""`diff` compares two committed steps, of one repository or of two.

Order: both steps are leased. The manifests tell which tensors exist, and which parts of them have the same chunks. Only
the other parts are read (`reading`). So two equal steps cost their manifests alone.
Invariant: a tensor is listed as equal only if all its bytes are. Tensors are compared as global tensors, so the number
of ranks and the mesh do not matter. A tensor that belongs to one rank is compared with that of the same rank.
Failure behaviour: `NotFoundError` for a missing run, step or tag. `CorruptionError` for a damaged chunk that had to be
read. Nothing is written but the leases, which are deleted again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.checkpoint.compare import tensors
from headrace.checkpoint.compare.numbers import Change
from headrace.checkpoint.compare.reading import Pair, PairReader, Side
from headrace.checkpoint.compare.tensors import Key
from headrace.checkpoint.compare.values import ValueChanges, changes
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.restoring.chunk_reader import LeasedStep, Saved
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store


@dataclass(frozen=True, slots=True)
class StepId:
    """A step, as a user names it: `RUN@STEP`, `RUN@latest` or `RUN@tag:NAME`."""

    run: str
    step: int | str

    @classmethod
    def parse(cls, text: str) -> StepId:
        """Parse the text; `UsageError` for another form."""
        run, at, step = text.rpartition("@")
        if not at or not step:
            raise UsageError(
                f"{text!r:.200} does not name a step",
                hint="write RUN@STEP, RUN@latest or RUN@tag:NAME, for example exp42@1200",
            )
        return cls(names.check_run(run), int(step) if step.isdecimal() and step.isascii() else step)

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that differs.

    - `rank`: the rank that the tensor belongs to; -1 if it belongs to the whole job.
    - `elements`: of the whole tensor. `read`: elements of the parts whose chunks differ.
    - `changed`: elements with other bits. `nonfinite`: of the read elements, those that are not finite in one step.
    - `norm_a`, `norm_b`, `norm_diff`, `largest`: over the read elements that are finite in both steps.
    """

    name: str
    rank: int
    dtype: str
    shape: tuple[int, ...]
    elements: int
    read: int
    changed: int
    nonfinite: int
    norm_a: float
    norm_b: float
    norm_diff: float
    largest: float

    @property
    def relative(self) -> float | None:
        """The norm of the difference, divided by that of the first tensor. None if the first norm is zero."""
        if self.norm_a > 0:
            return self.norm_diff / self.norm_a
        return 0.0 if self.norm_diff == 0 else None


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Type and shape of a tensor in each step; "" and () where the step does not have it."""

    name: str
    rank: int
    dtype_a: str
    shape_a: tuple[int, ...]
    dtype_b: str
    shape_b: tuple[int, ...]


@dataclass(slots=True)
class StepDiff:
    """The differences of two steps.

    - `equal`, `equal_bytes`: number and bytes of the tensors that are equal.
    - `changed`: tensors with other bytes, by name. `added`, `removed`: tensors that only the second, or the first step
      has. `reshaped`: tensors of another type or shape.
    - `values`: other values that differ.
    - `bytes_total`: of the tensors that both steps have. `bytes_compared`: those that were read from each step.
    """

    a: str
    b: str
    equal: int = 0
    equal_bytes: int = 0
    changed: list[TensorChange] = field(default_factory=list)
    added: list[TensorForm] = field(default_factory=list)
    removed: list[TensorForm] = field(default_factory=list)
    reshaped: list[TensorForm] = field(default_factory=list)
    values: ValueChanges = field(default_factory=ValueChanges)
    bytes_total: int = 0
    bytes_compared: int = 0
    equal_names: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether the steps have the same tensors and values."""
        return not (self.changed or self.added or self.removed or self.reshaped or self.values.total)


def diff(
    url: str | os.PathLike[str] | Store,
    a: str,
    b: str,
    *,
    other: str | os.PathLike[str] | Store | None = None,
    include: Callable[[str], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StepDiff:
    """Compare two steps. Only chunks that differ are read, and memory does not depend on their size.

    Args:
        url (str | os.PathLike[str] | Store): The repository: a path, `s3://bucket/prefix`, or an open `Store`.
        a (str): The first step: `RUN@STEP`, `RUN@latest` or `RUN@tag:NAME`.
        b (str): The second step.
        other (str | os.PathLike[str] | Store | None): The repository of the second step. Default: the same.
        include (Callable[[str], bool] | None): Compares only tensors for whose name it returns True. Default: all.
        progress (Callable[[int, int], None] | None): A function of the bytes compared so far and of all that will be.
        storage_options (Mapping[str, Any] | None): Options of both stores, as for `open_store`. Default: None.

    Returns:
        StepDiff: The differences.

    Raises:
        NotFoundError: A run, a step or a tag does not exist.
        CorruptionError: A chunk that had to be read is damaged.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer
        >>> folder = tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     _ = checkpointer.save(1, {"weight": torch.ones(4)}).result(timeout=60)
        ...     _ = checkpointer.save(2, {"weight": torch.tensor([1.0, 1, 1, 2])}).result(timeout=60)
        >>> found = diff(folder, "exp42@1", "exp42@2")
        >>> found.changed[0].name, found.changed[0].changed, found.changed[0].relative
        ('weight', 1, 0.5)
    """
    first, second = StepId.parse(a), StepId.parse(b)
    with contextlib.ExitStack() as stack:

        def opened(where: str | os.PathLike[str] | Store) -> Store:
            if isinstance(where, Store):
                return where
            return stack.enter_context(open_store(where, storage_options=storage_options))

        store = opened(url)
        sides = _open(store, first, stack), _open(store if other is None else opened(other), second, stack)
        return compare_steps(*sides, str(first), str(second), include, progress)


def _open(store: Store, at: StepId, stack: contextlib.ExitStack) -> Side:
    base = repository.find(store, at.run, at.step)
    if base is None:
        raise repository.missing(store, at.run)
    return Side(store, stack.enter_context(LeasedStep(store, at.run, base)))


def compare_steps(
    a: Side,
    b: Side,
    name_a: str,
    name_b: str,
    include: Callable[[str], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StepDiff:
    """Compare two open steps."""
    result = StepDiff(name_a, name_b, values=changes(a.step, b.step))
    ours, theirs = tensors.tensors_of(a.step), tensors.tensors_of(b.step)
    if include is not None:
        ours, theirs = ({key: each for key, each in side.items() if include(key[0])} for side in (ours, theirs))
    pairs = dict(_pairs(ours, theirs, result))
    total = sum(_bytes_of(pair) for pair in pairs.values())
    result.bytes_total += total
    to_read = {key: pair for key, pair in pairs.items() if pair.found is None or pair.found.parts}
    for key, pair in pairs.items():
        if key not in to_read:
            _add_equal(key, pair.a, result)
    _read(a, b, to_read, result, progress)
    return result


def _pairs(ours: Mapping[Key, Saved], theirs: Mapping[Key, Saved], result: StepDiff) -> Iterator[tuple[Key, Pair]]:
    """Pairs of tensors of the same type and shape. The others are put into the result."""
    for key, saved in ours.items():
        other = theirs.get(key)
        if other is None:
            result.removed.append(TensorForm(*key, saved.dtype, saved.shape, "", ()))
        elif (saved.dtype, saved.shape) != (other.dtype, other.shape):
            result.reshaped.append(TensorForm(*key, saved.dtype, saved.shape, other.dtype, other.shape))
        else:
            yield key, Pair(saved, other, tensors.parts(saved, other))
    for key, saved in theirs.items():
        if key not in ours:
            result.added.append(TensorForm(*key, "", (), saved.dtype, saved.shape))


def _read(
    a: Side,
    b: Side,
    pairs: Mapping[Key, Pair],
    result: StepDiff,
    progress: Callable[[int, int], None] | None,
) -> None:
    expected = sum(sum(part.length for part in each.found.parts) if each.found else 0 for each in pairs.values())

    def read(size: int) -> None:
        result.bytes_compared += size
        if progress is not None:
            progress(result.bytes_compared, max(expected, result.bytes_compared))

    reader = PairReader(a, b, read)
    for (key, pair), change in zip(pairs.items(), reader.changes(pairs.values()), strict=True):
        if change.changed:
            result.changed.append(_tensor_change(key, pair.a, change))
        else:
            _add_equal(key, pair.a, result)


def _add_equal(key: Key, saved: Saved, result: StepDiff) -> None:
    result.equal += 1
    result.equal_bytes += tensors.size_of(saved)
    result.equal_names.append(key[0])


def _bytes_of(pair: Pair) -> int:
    return tensors.size_of(pair.a)


def _tensor_change(key: Key, saved: Saved, change: Change) -> TensorChange:
    return TensorChange(
        *key,
        saved.dtype,
        saved.shape,
        tensors.elements_of(saved),
        change.elements,
        change.changed,
        change.nonfinite,
        change.norm_a,
        change.norm_b,
        change.norm_diff,
        change.largest,
    )
