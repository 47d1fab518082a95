"""Find the shards that a rank needs, without a table of all shards on any rank.

Each tensor has a *home*: the rank of the restoring job that a hash of its name selects. The ranks that have read the
manifests send the place of each shard (its box, and its number in a manifest) to the tensor's home. The home checks
that the shards of its tensors cover them once. Then every rank asks the homes for its tensors:

- `TensorHome.shapes` answers with types and shapes, so that the rank can compare the step with its state.
- `TensorHome.shards` answers with the places of the shards that overlap the rank's boxes, and whether another rank has
  asked for one of them too.

Invariant: this module only encodes messages and answers them; the caller exchanges them. A message holds plain values
that msgspec checks. An answer is only a hint about places: the reader checks that the shards it gets hold all of its
boxes, so a wrong answer is an error and never wrong bytes.

Failure behaviour: `CorruptionError` names the first tensor whose shards differ in type or shape, or do not cover it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.sharding import coverage_error
from headrace.checkpoint.state.home_plan import home_of
from headrace.dataio.core.errors import CorruptionError

TensorType = tuple[str, tuple[int, ...]]
"""The dtype and the global shape of a tensor."""


class ShardPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard: its box, and its number in the manifest of the rank `manifest`."""

    manifest: int
    number: int
    offset: tuple[int, ...]
    local: tuple[int, ...]


class HeldTensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The shards of one tensor in the manifests that one rank has read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: list[ShardPlace]


class Request(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The boxes of one tensor that a rank needs, each as offset and size."""

    name: str
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]


class Answer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The shards that overlap the boxes of a request, each as manifest and number. `alone`: see `Saved.alone`."""

    shards: list[tuple[int, int]]
    alone: bool


_held_decoder = msgspec.msgpack.Decoder(list[HeldTensor])
_names_decoder = msgspec.msgpack.Decoder(list[str])
_types_decoder = msgspec.msgpack.Decoder(list[TensorType | None])
_requests_decoder = msgspec.msgpack.Decoder(list[Request])
_answers_decoder = msgspec.msgpack.Decoder(list[Answer])


def places_by_home(manifests: Iterable[Manifest], world_size: int) -> dict[int, bytes]:
    """The messages of a rank that has read these manifests, by home."""
    by_name: dict[str, HeldTensor] = {}
    mismatched: list[HeldTensor] = []
    for manifest in manifests:
        for number, t in enumerate(manifest.tensors):
            if not t.replicated:
                continue
            held = by_name.setdefault(t.name, HeldTensor(t.name, t.dtype, t.shape, []))
            if (held.dtype, held.shape) != (t.dtype, t.shape):  # an error, which the home reports
                mismatched.append(held := HeldTensor(t.name, t.dtype, t.shape, []))
            held.shards.append(ShardPlace(manifest.rank, number, t.offset, t.local))
    return _by_home(((each.name, each) for each in (*by_name.values(), *mismatched)), world_size)


def names_by_home(names: Iterable[str], world_size: int) -> dict[int, list[str]]:
    """The names that the rank asks each home for."""
    by_home: dict[int, list[str]] = defaultdict(list)
    for name in names:
        by_home[home_of(name, world_size)].append(name)
    return by_home


def encode_names(names: Mapping[int, list[str]]) -> dict[int, bytes]:
    """The messages that ask for types and shapes, by home."""
    return {home: msgspec.msgpack.encode(its) for home, its in names.items()}


def encode_requests(names: Mapping[int, list[str]], boxes: Mapping[str, Sequence[Box]]) -> dict[int, bytes]:
    """The messages that ask for the shards of these boxes, by home."""
    return {
        home: msgspec.msgpack.encode([Request(name, [(box.offset, box.local) for box in boxes[name]]) for name in its])
        for home, its in names.items()
    }


def decode_types(data: bytes) -> list[TensorType | None]:
    return _types_decoder.decode(data)


def decode_answers(data: bytes) -> list[Answer]:
    return _answers_decoder.decode(data)


class TensorHome:
    """One rank's work for the tensors of which it is the home.

    Args:
        received: The messages of `places_by_home` to this rank.
        step: What the error of a damaged step begins with.
    """

    def __init__(self, received: Iterable[bytes], step: str) -> None:
        self._tensors: dict[str, _Tensor] = {}
        for data in received:
            for held in _held_decoder.decode(data):
                merged = self._tensors.setdefault(held.name, _Tensor(held.dtype, held.shape))
                if (problem := merged.add(held)) is not None:
                    raise _damaged(step, held.name, problem)
        for name, tensor in self._tensors.items():
            if (problem := coverage_error(tensor.boxes())) is not None:
                raise _damaged(step, name, problem)

    def shapes(self, received: Mapping[int, bytes]) -> dict[int, bytes]:
        """Answer the messages of `encode_names`, by sender: None for a tensor that the step does not hold."""
        answers: dict[int, bytes] = {}
        for sender, data in received.items():
            requested = [self._tensors.get(name) for name in _names_decoder.decode(data)]
            answers[sender] = msgspec.msgpack.encode([(t.dtype, t.shape) if t is not None else None for t in requested])
        return answers

    def shards(self, received: Mapping[int, bytes]) -> dict[int, bytes]:
        """Answer the messages of `requests_by_home`, by sender."""
        overlaps: dict[int, list[tuple[str, list[int]]]] = {}
        readers: Counter[tuple[str, int]] = Counter()
        for sender, data in received.items():
            its = overlaps[sender] = [(each.name, self._overlapping(each)) for each in _requests_decoder.decode(data)]
            readers.update((name, index) for name, indexes in its for index in indexes)
        return {
            sender: msgspec.msgpack.encode([self._answer(*each, readers) for each in its])
            for sender, its in overlaps.items()
        }

    def _overlapping(self, request: Request) -> list[int]:
        tensor = self._tensors.get(request.name)
        if tensor is None:
            return []
        return sorted({index for offset, local in request.boxes for index in tensor.overlapping(offset, local)})

    def _answer(self, name: str, indexes: Sequence[int], readers: Mapping[tuple[str, int], int]) -> Answer:
        if not indexes:
            return Answer([], True)
        shards = self._tensors[name].shards
        places = [(shards[index].manifest, shards[index].number) for index in indexes]
        return Answer(places, all(readers[name, index] == 1 for index in indexes))


class _Tensor:
    """The shards of one tensor, sorted by their offset in the dimension in which most of them differ."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.shards: list[ShardPlace] = []

    def add(self, held: HeldTensor) -> str | None:
        """Add shards; an error as text if they are of another type or shape."""
        self.shards += held.shards
        if held.dtype != self.dtype:
            return "its shards differ in type"
        return None if held.shape == self.shape else "its shards differ in shape"

    def boxes(self) -> list[Box]:
        return [Box(self.shape, shard.offset, shard.local) for shard in self.shards]

    def overlapping(self, offset: tuple[int, ...], local: tuple[int, ...]) -> Iterable[int]:
        """The shards that overlap a box, by their place in `shards`. A box of other dimensions overlaps none."""
        if len(offset) != len(self.shape) or len(local) != len(self.shape):
            return ()
        box = Box(self.shape, offset, local)
        if len(self.shards) == 1 or not self.shape:
            candidates: Iterable[int] = range(len(self.shards))
        else:
            dim, longest, order, starts = self._index
            first = bisect_right(starts, offset[dim] - longest)
            candidates = order[first : bisect_left(starts, offset[dim] + local[dim])]
        return (i for i in candidates if box.overlaps(Box(self.shape, self.shards[i].offset, self.shards[i].local)))

    @cached_property
    def _index(self) -> tuple[int, int, list[int], list[int]]:
        """A dimension, the largest extent in it, and the shards in its order, with their offsets."""
        dim = max(range(len(self.shape)), key=lambda d: len({shard.offset[d] for shard in self.shards}))
        order = sorted(range(len(self.shards)), key=lambda i: self.shards[i].offset[dim])
        longest = max(shard.local[dim] for shard in self.shards)
        return dim, longest, order, [self.shards[i].offset[dim] for i in order]


def _by_home(items: Iterable[tuple[str, object]], world_size: int) -> dict[int, bytes]:
    items_by_home: dict[int, list[object]] = defaultdict(list)
    for name, item in items:
        items_by_home[home_of(name, world_size)].append(item)
    return {home: msgspec.msgpack.encode(its) for home, its in items_by_home.items()}


def _damaged(step: str, name: str, problem: str) -> CorruptionError:
    return CorruptionError(f"{step}: tensor {name!r:.200}: {problem}", hint="run `headrace ckpt check`")
