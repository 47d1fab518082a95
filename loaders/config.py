"""The options of the loaders: each one is described once, checked, and converted for the parts that use it.

Purpose: `LoaderConfig` has the options that all loaders share. `VideoConfig`, `AudioConfig` and `FileConfig` add those
of one loader. `configured_by` gives a loader's constructor the same arguments, for `help` and for type checkers.
Invariants: a config is frozen and checked. This module reads no data and starts nothing; only `open_plan` opens the
datasets.
Failure behaviour: `UsageError` with the argument and a valid value; `TypeError` with the loader's name for an argument
that does not exist.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.core.suggestions import did_you_mean
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.batch.batch import AXES, Output
from headrace.loaders.batch.sample_builder import OnError
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import DEFAULT_MEMORY, BadSampleOptions, DeliveryOptions
from headrace.loaders.processors.wrappers import Transform, check_columns, sourced, wrapped
from headrace.loaders.sampling.plan import Bucketing, DatasetLike, Find, OrderPlan, Sampling, make_plan, open_datasets
from headrace.loaders.sampling.sample_ids import SampleIds, Small
from headrace.loaders.validation import check_choice, check_count, check_type, checked

if TYPE_CHECKING:  # few loaders need these, so they are imported where they are used
    from headrace.loaders.audio.spec import AudioSpec
    from headrace.loaders.decode.subprocess_decoder import SubprocessDecoder
    from headrace.loaders.quarantine.shared_list import QuarantineList
    from headrace.loaders.sampling.mixture import Mixture
    from headrace.loaders.sampling.packing import Pack

MAX_THREADS, DEFAULT_MOST_THREADS = 256, 16
MAX_PREFETCH = 64
MAX_BATCH = 1 << 16
MAX_MEMORY = 1 << 44
MAX_SECONDS = 3600.0
DTYPES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
P = ParamSpec("P")
ConfigT = TypeVar("ConfigT", bound="LoaderConfig")
LoaderT = TypeVar("LoaderT")
_OTHER_NAMES = {
    "num_workers": "num_threads",
    "prefetch_factor": "prefetch_batches",
    "transforms": "transform",
    "frames": "clip=Clip(frames=...)",
    "stride": "clip=Clip(stride=...)",
    "fps": "clip=Clip(fps=...)",
    "seconds": "window=Window(seconds)",
}
"""Names that other libraries use, and the arguments of this library that replace them."""
_NOT_NEEDED = {
    "batch_sampler": "shuffle=, drop_last= and seed= make the order; buckets= of Loader make batches of one shape",
    "collate_fn": "the loader makes the batches: transform= changes each sample, and Loader has collate= for its entries",
    "generator": "seed= makes the order and all random numbers",
    "multiprocessing_context": "num_threads= is the number of threads; decode_in_subprocess=True decodes in processes",
    "persistent_workers": "the threads of num_threads= stay between epochs",
    "pin_memory": 'with CUDA, batches are in pinned memory; device="pinned" requires it, and device="cuda" copies them',
    "resampled": "every sample is delivered once in each epoch; weights of a Mixture repeat samples",
    "sampler": "shuffle= and seed= make the order; the weights of a Mixture or a view of Dataset.where choose samples",
    "shuffle_buffer": "shuffle=True shuffles the whole dataset without a buffer",
    "worker_init_fn": "transform= gets a generator that is seeded for each sample; it is called in num_threads= threads",
}
"""Arguments of other libraries that no single argument of this library replaces, and what to use instead."""
_NOT_NEEDED |= {"buffer_size": _NOT_NEEDED["shuffle_buffer"], "shuffle_buffer_size": _NOT_NEEDED["shuffle_buffer"]}
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The options that all loaders share.

    Args:
        columns (Sequence[str]): columns of the index, or promoted fields of the samples' JSON, to add to every batch.
            "caption" is the text of the sample, and "fields.caption" the field of the JSON. Default: ().
        transform (Callable): called as `transform(tensors, generator)` for each sample, before pixels become floats. It
            returns a dict with the same names. Each sample has its own generator, which a resumed run seeds
            identically. Default: None.
        shuffle (bool): reshuffle in every epoch. Default: True.
        seed (int): seed of all random numbers; at most 64 bits. Default: 0.
        rank (int | None): this process's rank. Default: torch.distributed's, else 0.
        world_size (int | None): number of ranks. Default: torch.distributed's, else 1.
        drop_last (bool): drop the last global batch of an epoch if it is incomplete. With False the ranks share it as
            evenly as possible: a rank may get one sample fewer than another, or a batch without samples. With True, no epoch
            has the samples of a bucket that fills no global batch; a warning names them. Default: True.
        evaluate (bool): deliver every sample once, in order, without padding. Default: False.
        device (str | torch.device): "cpu" (pinned memory if CUDA is available), "pinned" (an error if CUDA is not
            available), "cuda", or a device. Default: "cpu".
        num_threads (int | None): number of decoding threads. Default: this rank's share of the machine's cores, at most
            16.
        prefetch_batches (int): number of batches prepared in advance, 1 to 64. Default: 2.
        memory_limit (int): limit in bytes on the samples in processing, and separately on the batches in preparation.
            Default: 4 GiB.
        copy (bool): allocate new memory for every batch. By default a batch's memory is reused once nothing refers to
            it. Default: False.
        sidecar (str | os.PathLike | None): "auto", the path of the sidecar's socket, or None to read without the
            sidecar. Default: "auto".
        on_error (str | None): "replace" substitutes a sample that is stored close to the damaged one; "skip" leaves the
            damaged sample out of its batch. Default: "replace"; in an evaluation, "skip".
        max_bad_samples (float): raise `CorruptionError` if more samples than this are damaged. It is a number or, below
            1, a fraction of the epoch's samples, rounded up. So a fraction always allows one damaged sample; 0 allows
            none. Each rank counts the samples that it skipped. Default: 0.01.
        quarantine_list (str | os.PathLike | QuarantineList | None): a list of bad samples that several runs share.
            Default: None.
        decode_in_subprocess (bool | float): decode with PyAV in subprocesses, so that a crash of a codec does not end
            the trainer. A number is the time limit of one decoding in seconds, up to 3600; True means 60. Default:
            False.
        version (int | str | None): version or tag of the dataset, if a URL was given. Default: the newest version.
        trust_mounts (bool): allow a dataset to keep its shards in directories of this machine, on private hosts and on
            other S3 endpoints. Default: False.
        storage_options (dict | None): options for the dataset's store, such as `{"endpoint_url": ...}`. Default: None.
    """

    columns: Sequence[str] = ()
    transform: Transform | None = None
    shuffle: bool = True
    seed: int = 0
    rank: int | None = None
    world_size: int | None = None
    drop_last: bool = True
    evaluate: bool = False
    device: str | torch.device = "cpu"
    num_threads: int | None = None
    prefetch_batches: int = 2
    memory_limit: int = DEFAULT_MEMORY
    copy: bool = False
    sidecar: str | os.PathLike[str] | None = "auto"
    on_error: OnError | None = None
    max_bad_samples: float = 0.01
    quarantine_list: str | os.PathLike[str] | QuarantineList | None = None
    decode_in_subprocess: bool | float = False
    version: int | str | None = None
    trust_mounts: bool = False
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("seed", int),
            *((name, bool) for name in ("shuffle", "drop_last", "evaluate", "copy", "trust_mounts")),
        ):
            object.__setattr__(self, name, checked(name, getattr(self, name), kind))
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise UsageError(f"seed={self.seed} does not fit 64 bits", hint="such as secrets.randbits(64)")
        check_type("columns", self.columns, (list, tuple), 'a list, such as ["width"]')
        check_type("sidecar", self.sidecar, (str, os.PathLike), '"auto", the path of a socket, or None')
        check_type("storage_options", self.storage_options, Mapping, "a dict of options")
        if self.on_error is not None:
            check_choice("on_error", self.on_error, get_args(OnError))
        transform: object = self.transform
        if transform is not None and not callable(transform):
            raise UsageError(f"transform={transform!r} cannot be called", hint="give f(tensors, generator)")
        isolate = checked("decode_in_subprocess", self.decode_in_subprocess, bool | float)
        if not isinstance(isolate, bool) and not 0 < isolate <= MAX_SECONDS:
            raise UsageError(
                f"decode_in_subprocess={isolate!r} is not a time limit",
                hint=f"True, or seconds, up to {MAX_SECONDS:.0f}",
            )

    def sampling(self, batch_size: int | None) -> Sampling:
        """How this rank's batches are composed."""
        if batch_size is not None:
            batch_size = check_count("batch_size", batch_size, MAX_BATCH)
        rank, world_size = rank_and_world_size(self.rank, self.world_size)
        return Sampling(
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            evaluate=self.evaluate,
        )

    def output(
        self,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        dtype: str | torch.dtype | None = None,
        layout: str = "TCHW",
    ) -> Output:
        """Device, dtype and axes of the batches, checked."""
        check_choice("layout", layout, tuple(AXES))
        kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if dtype is not None and kind not in DTYPES.values():
            raise UsageError(f"dtype {dtype!r} is not known", hint=f"use {', '.join(DTYPES)}")
        if normalize is not None and kind == torch.uint8:
            raise UsageError("normalized pixels are not whole numbers", hint="use a floating dtype")
        device, pinned = _device(self.device)
        output = Output(device, pinned, dtype=kind, axes=layout)
        if normalize is None:
            return output
        try:
            mean, std = (tuple(float(value) for value in values) for values in normalize)
            if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
                raise ValueError
        except (TypeError, ValueError):
            raise UsageError(
                f"normalize={normalize!r} is not (mean, std), three numbers each, the deviations positive",
                hint="such as ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))",
            ) from None
        return replace(output, mean=mean, std=std)

    def delivery(self, output: Output, *, group: int) -> DeliveryOptions:
        """How batches are built. On a GPU, `group` samples are decoded together."""
        threads = default_threads() if self.num_threads is None else self.num_threads
        return DeliveryOptions(
            output=output,
            num_threads=check_count("num_threads", threads, MAX_THREADS),
            prefetch_batches=check_count("prefetch_batches", self.prefetch_batches, MAX_PREFETCH),
            group=group if output.device.type == "cuda" else 1,
            sidecar=self.sidecar,
            memory_limit=check_count("memory_limit", self.memory_limit, MAX_MEMORY),
            copy=self.copy,
            alone_by_default=self.rank is None and not _in_world(),
        )

    @property
    def bad_samples(self) -> BadSampleOptions:
        """How damaged samples are handled.

        In an evaluation, a substitute would be counted twice, so the default is "skip".
        """
        on_error = self.on_error or ("skip" if self.evaluate else "replace")
        return BadSampleOptions(self.max_bad_samples, on_error, self.quarantine_list)

    def subprocess_decoder(self, num_threads: int) -> SubprocessDecoder | None:
        """A decoder with one process for each thread, or None without `decode_in_subprocess`."""
        if self.decode_in_subprocess is False:
            return None
        from headrace.loaders.decode.subprocess_decoder import SECONDS, SubprocessDecoder

        limit = SECONDS if self.decode_in_subprocess is True else float(self.decode_in_subprocess)
        return SubprocessDecoder(num_threads, limit)

    def open_plan(
        self,
        source: DatasetLike | Mixture,
        find: Find,
        parts: Any,
        sampling: Sampling,
        buckets: Bucketing | None = None,
        pack: Pack | None = None,
    ) -> tuple[OrderPlan, Sequence[Dataset]]:
        """Open the datasets of `source`, and plan the order of their samples.

        Returns:
            The plan, and the datasets that were opened for it. The loader closes these.
        """

        def find_checked(dataset: Dataset) -> tuple[SampleIds, int | Small]:
            if self.columns:
                check_columns(self.columns, dataset.document.summary().fields, dataset.url)
            return find(dataset)

        opened = open_datasets(source, self.version, self.storage_options, self.trust_mounts)
        try:
            return make_plan(opened, find_checked, parts, sampling, buckets, pack), opened.owned
        except BaseException:
            opened.close()
            raise

    def finish(
        self, processor: Processor, spec: AudioSpec | None, device: torch.device, names: Sequence[str]
    ) -> Processor:
        """Wrap `processor` so that it adds spectrograms, columns, the transform and source names, as requested."""
        if spec is not None:
            from headrace.loaders.processors.wrappers import mels

            processor = mels(processor, spec, device)
        return sourced(wrapped(processor, self.columns, self.transform), names)


def configured_by(
    config: Callable[P, ConfigT],
) -> Callable[[Callable[[LoaderT, ConfigT], None]], Callable[Concatenate[LoaderT, P], None]]:
    """Let a loader's `__init__(self, config)` be called with the arguments of the config class.

    The arguments and their documentation are those of the config class, so `help` and type checkers show all of them.
    """
    signature = inspect.signature(config)
    shared = {field.name for field in fields(LoaderConfig)}
    own_first = sorted(signature.parameters.values(), key=lambda one: one.name in shared)
    positional = [one for one in own_first if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = [one for one in own_first if one.kind is inspect.Parameter.KEYWORD_ONLY]
    own_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def decorate(init: Callable[[LoaderT, ConfigT], None]) -> Callable[Concatenate[LoaderT, P], None]:
        @functools.wraps(init)
        def configured(self: LoaderT, *args: P.args, **kwargs: P.kwargs) -> None:
            name = type(self).__name__
            for argument in kwargs:
                if argument not in signature.parameters:
                    raise TypeError(f"{name}() has no argument {argument!r}{_instead(argument, signature.parameters)}")
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}(): {error}") from None
            init(self, config(*args, **kwargs))

        shown: Any = configured
        shown.__signature__ = signature.replace(parameters=[own_self, *positional, *keywords], return_annotation=None)
        shown.__doc__ = "\n\n".join(inspect.cleandoc(one.__doc__ or "") for one in (config, LoaderConfig))
        return cast(Callable[Concatenate[LoaderT, P], None], shown)

    return decorate


def _instead(argument: str, known: Iterable[str]) -> str:
    """Text that says what replaces an unknown argument; "" if nothing is known."""
    if argument in _NOT_NEEDED:
        return f"; {_NOT_NEEDED[argument]}"
    return did_you_mean(argument, known, _OTHER_NAMES)


def default_threads() -> int:
    """This process's share of the cores that it may use, at most 16.

    torchrun's `LOCAL_WORLD_SIZE` is the number of shares.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(DEFAULT_MOST_THREADS, usable // max(1, int(sharing) if sharing.isdecimal() else 1)))


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The given rank and world size; by default those of torch.distributed, else (0, 1)."""
    if (rank is None) != (world_size is None):
        raise UsageError("of rank and world_size one is missing", hint="give both, or neither")
    rank, world_size = checked("rank", rank, int | None), checked("world_size", world_size, int | None)
    if rank is None or world_size is None:
        if _in_world():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
                alone = "WORLD_SIZE is set but torch.distributed is not initialised: every rank reads everything"
                warn_once(_log, alone, "job")
            rank, world_size = 0, 1
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is outside a world of {world_size}", hint="ranks count from 0")
    return rank, world_size


def _in_world() -> bool:
    """Whether torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def _device(device: str | torch.device) -> tuple[torch.device, bool]:
    """The device of batches, and whether they are in pinned memory."""
    name: str = checked("device", str(device) if isinstance(device, torch.device) else device, str)
    if name == "cpu:0":  # as Accelerate calls it
        name = "cpu"
    if name.split(":")[0] not in ("cpu", "pinned", "cuda"):
        raise UsageError(f"device {name!r} is not known", hint="use 'cpu', 'pinned' or 'cuda'")
    has_cuda = torch.cuda.is_available()
    if not has_cuda and name != "cpu":
        raise UsageError(f"device={name!r}, but torch sees no GPU", hint="use device='cpu'")
    if name.startswith("cuda"):
        chosen = torch.device(name)
        return (torch.device("cuda", torch.cuda.current_device()) if chosen.index is None else chosen), False
    return torch.device("cpu"), has_cuda
