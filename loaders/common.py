"""What every loader may be asked for, whatever its batches hold: said, checked and put together in one place.

Purpose: `VideoLoader` and `AudioLoader` say only what is theirs; `VideoLoader`'s documentation says what each of these means.
Invariants: `Common` is what a type checker sees of them, `Asked` what is there at run time, with the defaults; a test holds
that they have the same names and types. Nothing here reads data or starts anything, but `planned`, which opens what it is given.
Failure behaviour: `UsageError` naming the argument; `TypeError` for one that there is not, naming the loader.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, get_args

import torch

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import arguments
from headrace.loaders.batch.batch import Output
from headrace.loaders.batch.sample_builder import OnError
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import DEFAULT_MEMORY, Delivery, Refusing
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import DatasetLike, Find, OrderPlan, Sampling, Sorting, open_datasets, plan
from headrace.loaders.validation import plain
from headrace.loaders.works.added import Transform, wrapped
from headrace.loaders.works.sources import sourced

if TYPE_CHECKING:  # what few loaders need is imported where they need it
    from headrace.loaders.decode.isolated import IsolatedDecoder
    from headrace.loaders.quarantine.shared_list import QuarantineList
    from headrace.loaders.sampling.mixture import Mixture
    from headrace.loaders.sampling.packing import Pack
    from headrace.loaders.sound.spec import AudioSpec

Kind = TypeVar("Kind", bound=type)
_ELSEWHERE = {
    "num_workers": "threads",
    "prefetch_factor": "prefetch",
    "transforms": "transform",
    "frames": "clip=Clip(frames=...)",
    "stride": "clip=Clip(stride=...)",
    "fps": "clip=Clip(fps=...)",
    "seconds": "window=Window(seconds)",
}
"""What other loaders call it, or what it is a part of here."""


def _meant(name: str, signature: inspect.Signature) -> str:
    """What somebody may have meant by an argument that there is not."""
    import difflib

    known = list(signature.parameters)
    found = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), "")
    return f" (did you mean {found}?)" if found.partition("=")[0] in known else ""


def explicit(kind: Kind) -> Kind:
    """Let `help` and completion show all arguments of a loader, each with its default, in place of `**common`."""
    signature = inspect.signature(kind)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(Asked)
    ]
    kind.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    return kind


class Common(TypedDict, total=False):
    """As `Asked`."""

    columns: Sequence[str]
    device: str | torch.device
    shuffle: bool
    seed: int
    rank: int | None
    world_size: int | None
    drop_last: bool
    evaluate: bool
    transform: Transform | None
    sidecar: str | os.PathLike[str] | None
    threads: int | None
    prefetch: int
    memory: int
    copy: bool
    quarantine_limit: float
    on_bad: OnError | None
    quarantine_list: str | os.PathLike[str] | QuarantineList | None
    isolate: bool | float
    version: int | str | None
    trust_mounts: bool
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for, or the default."""

    columns: Sequence[str] = ()
    device: str | torch.device = "cpu"
    shuffle: bool = True
    seed: int = 0
    rank: int | None = None
    world_size: int | None = None
    drop_last: bool = True
    evaluate: bool = False
    transform: Transform | None = None
    sidecar: str | os.PathLike[str] | None = "auto"
    threads: int | None = None
    prefetch: int = 2
    memory: int = DEFAULT_MEMORY
    copy: bool = False
    quarantine_limit: float = 0.01
    on_bad: OnError | None = None
    quarantine_list: str | os.PathLike[str] | QuarantineList | None = None
    isolate: bool | float = False
    version: int | str | None = None
    trust_mounts: bool = False
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("seed", int),
            *((name, bool) for name in ("shuffle", "drop_last", "evaluate", "copy", "trust_mounts")),
        ):
            object.__setattr__(self, name, plain(name, getattr(self, name), kind))
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise UsageError(f"seed={self.seed} does not fit 64 bits", hint="such as secrets.randbits(64)")
        arguments.of_kind("columns", self.columns, (list, tuple), 'a list, such as ["width"]')
        arguments.of_kind("sidecar", self.sidecar, (str, os.PathLike), '"auto", the path of a socket, or None')
        arguments.of_kind("storage_options", self.storage_options, Mapping, "a dict of options")
        if self.on_bad is not None:
            arguments.one_of("on_bad", self.on_bad, get_args(OnError))
        transform: object = self.transform
        if transform is not None and not callable(transform):
            raise UsageError(f"transform={transform!r} cannot be called", hint="give f(tensors, generator)")

    @classmethod
    def of(cls, loader: object, common: Common) -> Self:
        """What a loader was called with."""
        known = {field.name for field in fields(cls)}
        for name in common:
            if name not in known:
                kind = type(loader)
                raise TypeError(f"{kind.__name__}() has no argument {name!r}{_meant(name, inspect.signature(kind))}")
        return cls(**common)

    def sampling(self, batch_size: int | None) -> Sampling:
        """How batches are put together, for this rank."""
        if batch_size is not None:
            batch_size = arguments.checked("batch_size", batch_size, arguments.MAX_BATCH)
        place = arguments.place_in_world(self.rank, self.world_size)
        return Sampling(batch_size, *place, self.seed, self.shuffle, self.drop_last, self.evaluate)

    def delivery(self, made_of: Output, *, group: int) -> Delivery:
        """How batches are made; on a GPU, `group` samples together."""
        arguments.check_isolate(self.isolate)
        threads = arguments.cores() if self.threads is None else self.threads
        return Delivery(
            made_of,
            arguments.checked("threads", threads, arguments.MAX_THREADS),
            arguments.checked("prefetch", self.prefetch, arguments.MAX_PREFETCH),
            group if made_of.device.type == "cuda" else 1,
            self.sidecar,
            arguments.checked("memory", self.memory, arguments.MAX_MEMORY),
            self.copy,
            assumed=self.rank is None and not arguments.in_world(),
        )

    @property
    def refusing(self) -> Refusing:
        """What becomes of damaged samples. Who stood in for one in an evaluation would be counted twice."""
        on_bad = self.on_bad or ("shorter" if self.evaluate else "replace")
        return Refusing(self.quarantine_limit, on_bad, self.quarantine_list)

    def isolated(self, delivery: Delivery) -> IsolatedDecoder | None:
        """A process for each thread, where they are wanted."""
        return arguments.isolated(self.isolate, delivery.threads)

    def planned(
        self,
        place: DatasetLike | Mixture,
        find: Find,
        what: Any,
        how: Sampling,
        sorting: Sorting | None = None,
        pack: Pack | None = None,
    ) -> tuple[OrderPlan, Sequence[Dataset]]:
        """The plan for what `place` names, and the datasets that were opened for it, to be closed with the loader."""

        def checked(dataset: Dataset) -> tuple[I64, int | I64]:
            arguments.added(dataset, self.columns)
            return find(dataset)

        source = open_datasets(place, self.version, self.storage_options, self.trust_mounts)
        try:
            return plan(source, checked, what, how, sorting, pack), source.owned
        except BaseException:
            source.close()
            raise

    def finished(
        self, work: Processor, spec: AudioSpec | None, device: torch.device, names: Sequence[str]
    ) -> Processor:
        """`work` with the features, columns, transform and names of sources that are wanted around it."""
        if spec is not None:
            from headrace.loaders.works.mels import mels

            work = mels(work, spec, device)
        return sourced(wrapped(work, self.columns, self.transform), names)
