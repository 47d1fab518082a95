"""The interface of a field: the files that it needs, the value that it makes of them, and how a batch holds the values.

Purpose: `Loader(dataset, fields={name: field})` builds each entry of its batches from one field. Users write their own
fields by subclassing `Field`.
Invariants: a field is immutable. The result of `decode` depends only on its argument, so a resumed run and another
world size get the same values. `decode` may run in several threads at the same time.
Failure behaviour: `decode` raises `CorruptionError` for damaged data and `UnsupportedError` for a format that it does
not know. Both make the sample a bad sample, and the loader replaces or skips it. Any other error ends the iteration,
with a note that names the field and the sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.sample import Sample
from headrace.loaders.clip import ClipTimes
from headrace.loaders.interfaces import Collate as Collate  # for fields of users
from headrace.loaders.interfaces import SampleRef

if TYPE_CHECKING:
    import torch

_GENERATOR = 26  # the purpose of the generator's seed; no other module uses the number


class FieldInput(msgspec.Struct, frozen=True, gc=False):
    """The argument of `Field.decode`.

    Args:
        sample: the sample, as the index describes it.
        files: the whole contents of the files that the field needs, read-only, by extension. Their digests are checked.
        ref: the part (clip, window) of the sample, and its position in the order.
        times: when the frames of the clips of the `Video` fields are shown, by the names of these fields. `instants`
            returns them in seconds.
        shared (dict): what fields keep for the other fields of the same sample, such as a parsed file. A key begins with
            the class of the field.

    Example:
        >>> import dataclasses, torch
        >>> @dataclasses.dataclass(frozen=True)
        ... class Noise(Field):
        ...     def decode(self, data):
        ...         return torch.randn(4, generator=data.generator())
        >>> loader = Loader(clips, batch_size=2, fields={"noise": Noise()})
        >>> next(iter(loader))["noise"].shape
        torch.Size([2, 4])
        >>> loader.close()
    """

    sample: Sample
    files: Mapping[str, memoryview]
    ref: SampleRef
    times: Mapping[str, ClipTimes] = {}
    shared: dict[Any, Any] = msgspec.field(default_factory=dict)

    def instants(self, name: str) -> tuple[Fraction, ...]:
        """Return when each frame of the clip of a `Video` field is shown, in seconds on the sample's clock.

        Args:
            name (str): name of the field.

        Raises:
            UsageError: there is no `Video` field of this name, or the sample lacks its file.

        Example:
            >>> import dataclasses
            >>> @dataclasses.dataclass(frozen=True)
            ... class Length(Field):
            ...     def decode(self, data):
            ...         instants = data.instants("front")
            ...         return float(instants[-1] - instants[0])
            >>> fields = {"front": Video(Clip(frames=4), size=(32, 32)), "length": Length()}
            >>> loader = Loader(clips, batch_size=2, fields=fields)
            >>> next(iter(loader))["length"].shape
            torch.Size([2])
            >>> loader.close()
        """
        times = self.times.get(name)
        if times is None:
            known = ", ".join(map(repr, self.times)) or "none"
            raise UsageError(
                f"the loader has no clip of a Video field {name!r:.80} for sample {self.sample.key!r}",
                hint=f"the clips of this sample: {known}",
            )
        return times.seconds

    def generator(self) -> torch.Generator:
        """Return a new random generator, whose seed depends on the loader's seed, the epoch and the sample."""
        import torch

        return torch.Generator().manual_seed(int(self.ref.key(_GENERATOR)[0]) >> 1)


class Field(ABC):
    """One entry of a batch. Subclasses are frozen dataclasses, so threads can share them.

    Attributes:
        files: extensions of the files of a sample that `decode` needs, such as `("latent.npy",)`. A sample that lacks
            one of them is left out of the loader, unless `required` is False.
        collate: how the values of a batch become one entry (see `Collate`). Default: "stack".
        required: whether samples without the field are left out. With False they stay: their value is None in a list,
            and zeros in a tensor. The entry `<name>.present`, bool (B,), says which samples have it. Default: True.
        uses_caption: whether the field needs the sample's caption. With `required`, samples without one are left out.
            Default: False.
        in_place: whether `decode` looks only at the start of its one file, and returns the array that is stored after
            it, to the end of the file. The loader then reads the arrays of other files with the same start directly
            into the batch, and does not call `decode` for them. Default: False.
        entries: further entries of the field, `<name>.<entry>`, and their values for samples that lack an optional
            field. With them, `decode` returns the value and a dict of these values. Default: none.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class FirstBytes(Field):
        ...     files: tuple = ("mp4",)
        ...
        ...     def decode(self, data):
        ...         return int.from_bytes(data.files["mp4"][:8])
        >>> loader = Loader(clips, batch_size=2, fields={"first": FirstBytes()})
        >>> next(iter(loader))["first"].shape
        torch.Size([2])
        >>> loader.close()
    """

    files: tuple[str, ...] = ()
    collate: Collate = "stack"
    required: bool = True
    uses_caption: bool = False
    in_place: bool = False
    entries: Mapping[str, Any] = {}

    @abstractmethod
    def decode(self, data: FieldInput) -> Any:
        """Return the value of one sample: a tensor, a numpy array or any other object.

        Arrays may share the memory of `data.files`. The loader copies them into the batch.

        Raises:
            CorruptionError: the bytes are damaged, or not of the format.
            UnsupportedError: the format is not supported.
        """

    def nbytes(self, sample: Sample) -> int:
        """Return the memory in bytes that the value of this sample takes, in addition to its files.

        The loader limits the memory of its samples by it. Default: the total size of the files.
        """
        return sum([member.length for member in sample.members if member.ext in self.files])
