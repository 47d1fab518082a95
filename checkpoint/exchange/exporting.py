"""`export` writes a step as files of another format.

Invariant: the step is leased while it is read, so retention cannot remove it. Every byte is checked against its digest.
A target gets its final name when it is complete.
Failure behaviour: the errors of `entries`, before anything is written, and those of `writing`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoint.exchange import dcp_format, entries, safetensors_format, torch_format
from headrace.checkpoint.exchange.entries import Contents, Flat, Rename
from headrace.checkpoint.exchange.output import Data, OutputFile
from headrace.checkpoint.exchange.safetensors_format import NamedData
from headrace.checkpoint.exchange.torch_format import Storage, TensorStub, row_major
from headrace.checkpoint.exchange.writing import Report, Target, write_files
from headrace.checkpoint.format import chunking
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring.chunk_reader import LeasedStep
from headrace.checkpoint.state.build import plain
from headrace.checkpoint.state.tree import MetaNode, PartsNode, TensorRef, ValueNode, ViewRef, join, tensor_names
from headrace.dataio.core.errors import CorruptionError, MismatchError, UnsupportedError, UsageError
from headrace.dataio.core.limits import parse_bytes
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

FORMATS = ("safetensors", "hf", "dcp", "torch")
_FORMATS_BY_SUFFIX = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch"}
_SUFFIX_OF_A_FILE = re.compile(r"\.[A-Za-z]\w{0,11}")
"""A name such as `llama-3.1-8b` or `v1.5` has no such suffix, so it is that of a folder."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_CONVERTED = {"float64", "float32", "float16", "bfloat16"}
_SHARD_BYTES = 5_000_000_000
_OF_HF = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_OF_DCP = re.compile(r"__\d+_\d+\.distcp|\.metadata")


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `export` wrote.

    - `files`: the paths of all files; `bytes`: the sum of their sizes.
    - `bytes_written`: the bytes that this call wrote. It is less if an interrupted export was continued.
    - `tensors`: the number of tensors. `tied`: the names that are left out, with the name that has their values.
    - `left_out`: the paths of entries that are not exported: those that `exclude` matches, and those that the format does
      not hold. Entries that `include` does not match are not listed.
    """

    run: str
    step: int
    format: str
    files: list[str]
    bytes: int
    bytes_written: int
    tensors: int
    tied: dict[str, str]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class _Options:
    format: str
    include: str | Iterable[str] | None
    exclude: str | Iterable[str]
    dtype: str
    rename: Rename
    most: int | None
    rank: int


def export(
    url: str | os.PathLike[str] | Store,
    dest: str | os.PathLike[str],
    *,
    run: str,
    step: int | str = "latest",
    tag: str | None = None,
    format: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    dtype: str | None = None,
    rename: Rename = None,
    max_shard_size: int | str | None = None,
    rank: int = 0,
    overwrite: bool = False,
    progress: Report | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a step as files of another format. Memory does not grow with the size of the step.

    If the export is interrupted or the disk is full, the same call continues where it stopped.

    Args:
        url (str | os.PathLike[str] | Store): The repository: a path, `s3://bucket/prefix`, or an open `Store`.
        dest (str | os.PathLike[str]): The file ("safetensors", "torch") or folder ("hf", "dcp") to write.
        run (str): The run's name.
        step (int | str): A step's number, or "latest". Default: "latest".
        tag (str | None): The tag of a step, instead of `step`. Default: None.
        format (str | None): "hf" (a folder of weights for transformers, without config.json), "safetensors", "dcp"
            (torch.distributed.checkpoint) or "torch" (a file that `torch.load(weights_only=True)` reads). Default: None,
            which means "safetensors" if `dest` ends in `.safetensors`, "torch" if it ends in `.pt` or `.pth`, and "hf"
            for a folder. Another suffix, such as `.bin`, is refused, unless the folder exists.
        include (str | Iterable[str] | None): Patterns of the entries to export, as for `restore`. Default: None. "hf"
            and "safetensors" then export the modules of the state, the other formats export everything.
        exclude (str | Iterable[str]): Patterns of entries to leave out. Default: none.
        dtype (str | None): Convert float64, float32, float16 and bfloat16 tensors: "fp32", "fp16" or "bf16".
            Default: None, no conversion.
        rename (Mapping[str, str] | Callable[[str], str] | None): New names of entries. A mapping has names, prefixes
            that end in "." or "/", or patterns with `*`. Default: None.
        max_shard_size (int | str | None): The largest size of a safetensors file, in bytes or as text such as "5GB" or
            "512MiB". Default: None, which means 5 GB for "hf" and one file for "safetensors".
        rank (int): The rank whose rank-local entries are exported. The step must have it. Default: 0.
        overwrite (bool): Replace files that exist. Default: False.
        progress (Callable[[Progress], object] | None): Called with the bytes that are written. Default: None.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Returns:
        ExportReport: The files, and the entries that are left out.

    Raises:
        UsageError: An argument is invalid, a pattern has no match, names collide, or the target exists.
        NotFoundError: The run, the step or the tag does not exist.
        UnsupportedError: The format cannot hold a tensor.
        CapacityError: The disk is full. Free space, and repeat the call.
        CorruptionError: Stored bytes are damaged. The message names step, tensor, pack and offset.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer, export
        >>> folder, target = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     _ = checkpointer.save(1, {"model": torch.nn.Linear(2, 2)}).result(timeout=60)
        >>> report = export(folder, f"{target}/model", run="exp42", format="hf")
        >>> report.tensors, report.files[0].rpartition("/")[2]
        (2, 'model.safetensors')
    """
    format = _format_of(dest) if format is None else format
    options = _checked(format, include, exclude, dtype, rename, _shard_size(max_shard_size), rank)
    target = _target(dest, format)
    with contextlib.ExitStack() as stack:
        store = url if isinstance(url, Store) else stack.enter_context(open_store(url, storage_options=storage_options))
        opened = stack.enter_context(_leased(store, run, repository.step_or_tag(step, tag)))
        plan = _planned(opened, options, target)
        identity = _identity(opened, rank, plan.files)
        written = write_files(
            store, opened, plan.files, target, identity=identity, overwrite=overwrite, progress=progress
        )
    return _report(opened, format, target, plan, written)


def _format_of(dest: str | os.PathLike[str]) -> str:
    """The format of an export by the name of its destination. A name that ends in a slash is that of a folder."""
    text = os.fspath(dest)
    suffix = "" if text.endswith("/") else Path(text).suffix
    if suffix in _FORMATS_BY_SUFFIX:
        return _FORMATS_BY_SUFFIX[suffix]
    if _SUFFIX_OF_A_FILE.fullmatch(suffix) and not os.path.isdir(text):
        raise UsageError(
            f"{text:.300} ends in {suffix}, which is no suffix of an export",
            hint=f"name a file with {', '.join(_FORMATS_BY_SUFFIX)}, or choose a --format: hf and dcp write a folder",
        )
    return "hf"


def _shard_size(given: object) -> int | None:
    if isinstance(given, str):
        return parse_bytes(given)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        hint = 'give a number of bytes, or text such as "5GB"'
        raise UsageError(f"max_shard_size is {given!r:.60}", hint=hint)
    return given


def _leased(store: Store, run: str, step: int | str) -> LeasedStep:
    """The step, which is leased while the caller has it open."""
    base = repository.find(store, run, step)
    if base is None:
        raise repository.missing(store, run)
    return LeasedStep(store, run, base)


def _report(step: Step, format: str, target: Target, plan: _Plan, written: int) -> ExportReport:
    return ExportReport(
        run=step.run,
        step=step.base.step,
        format=format,
        files=[str(target.final(file)) for file in plan.files],
        bytes=sum(file.size for file in plan.files),
        bytes_written=written,
        tensors=plan.tensors,
        tied=plan.tied,
        left_out=plan.left_out,
    )


def _checked(
    format: str,
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str],
    dtype: str | None,
    rename: Rename,
    most: int | None,
    rank: int,
) -> _Options:
    if format not in FORMATS:
        raise UsageError(f"format is {format!r:.60}", hint=f"choose one of: {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r:.60}", hint=f"choose one of: {', '.join(DTYPES)}")
    if most is not None and (format not in ("hf", "safetensors") or most < 1):
        raise UsageError(f"max_shard_size is {most} for format {format}", hint="it divides safetensors files only")
    if rank < 0:
        raise UsageError(f"rank {rank} does not exist", hint="ranks count from 0")
    if rename is not None and not callable(rename):
        entries.check_rules(rename)
    if format == "hf" and most is None:
        most = _SHARD_BYTES
    return _Options(format, include, exclude, DTYPES[dtype] if dtype else "", rename, most, rank)


def _target(dest: str | os.PathLike[str], format: str) -> Target:
    text = os.fspath(dest)
    if "://" in text:
        raise UsageError(f"{text} is not a path", hint="export to a local disk, and copy the files from there")
    path = Path(os.path.realpath(text))  # a symbolic link stays, and its target is written
    is_folder = format in ("hf", "dcp")
    if path.exists() and path.is_dir() != is_folder:
        what = "a file" if is_folder else "a folder"
        raise UsageError(f"{text} is {what}", hint=f"format {format} needs {'a folder' if is_folder else 'a file'}")
    pattern = {"hf": _OF_HF, "dcp": _OF_DCP}.get(format)
    return Target(path, is_folder, lambda name: pattern is not None and pattern.fullmatch(name) is not None)


def _identity(step: Step, rank: int, files: list[OutputFile]) -> str:
    """Text that is equal if the same command would write the same bytes."""
    described = [
        (
            file.name,
            file.size,
            [
                part if isinstance(part, bytes) else (part.saved.name, part.start, len(part), part.target)
                for part in file.parts
                if isinstance(part, (bytes, Data))
            ],
        )
        for file in files
    ]
    return chunking.digest(msgspec.msgpack.encode([step.run, step.base, rank, described])).hex()


@dataclass(frozen=True, slots=True)
class _Plan:
    files: list[OutputFile]
    tensors: int
    tied: dict[str, str]
    left_out: list[str]


def _planned(step: Step, options: _Options, target: Target) -> _Plan:
    """The files to write."""
    if options.rank >= (ranks := len(step.manifests)):
        number = step.base.step
        raise UsageError(f"step {number} has no rank {options.rank}", hint=f"its ranks are 0 to {ranks - 1}")
    found = entries.contents(step, options.rank)
    if options.format in ("hf", "safetensors"):
        return _plan_flat(found, options, target)
    return _plan_nested(found, options)


def _plan_flat(found: Contents, options: _Options, target: Target) -> _Plan:
    """The files of the formats that hold tensors by name."""
    flat: Flat = entries.flat(found, options.include, options.exclude, options.rename)
    tensors = [NamedData(name, *_data(found, node, name, options.dtype)) for name, node in flat.tensors.items()]
    stem, single = "model", "model.safetensors"
    if options.format == "safetensors":
        stem, single = target.path.name.removesuffix(".safetensors"), target.path.name
    files = safetensors_format.output_files(tensors, flat.tied, stem=stem, single=single, most=options.most)
    return _Plan(files, len(tensors), flat.tied, flat.left_out)


def _data(found: Contents, node: TensorRef | ViewRef, name: str, dtype: str) -> tuple[tuple[int, ...], Data]:
    """The shape and the bytes of one tensor, converted to `dtype` if it has a type that is converted."""
    saved = found.saved(node.name)
    if isinstance(node, TensorRef):
        return saved.shape, Data(saved, saved.dtype, _count(saved.shape), target=_converted(saved.dtype, dtype))
    _check_view(node, saved.dtype, saved.shape)
    if node.stride != row_major(node.shape):
        raise UnsupportedError(
            f"{name}: the tensor is a view that is not contiguous", hint="exclude it, or export with --format torch"
        )
    return node.shape, Data(saved, node.dtype, _count(node.shape), node.offset, _converted(node.dtype, dtype))


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _converted(dtype: str, wanted: str) -> str:
    return wanted if wanted and dtype in _CONVERTED and dtype != wanted else ""


def _check_view(node: ViewRef, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise `CorruptionError` for a view that reaches outside its memory."""
    size = chunking.ITEM_BYTES.get(node.dtype, 0)
    last = sum((n - 1) * step for n, step in zip(node.shape, node.stride, strict=False))
    sound = size and dtype == "uint8" and len(shape) == 1 and len(node.shape) == len(node.stride)
    if not sound or 0 in node.shape or node.offset % size or node.offset + (last + 1) * size > shape[0]:
        raise CorruptionError(f"the checkpoint holds a view that reaches outside tensor {node.name!r:.200}")


def _plan_nested(found: Contents, options: _Options) -> _Plan:
    """The files of the formats that hold nested dicts, tensors and values."""
    all_leaves = list(entries.leaves(found.root, lists=False))
    chosen = entries.selected(all_leaves, options.include, options.exclude)
    entries.refuse_composite(chosen)
    build = _Build(found, options.dtype)
    left_out = entries.others(all_leaves, chosen, options.exclude) if options.include is None else []
    kept = []
    for leaf in chosen:
        value = build.value(leaf.node, leaf.path)
        if torch_format.is_plain(value):
            kept.append(entries.Leaf(leaf.path, leaf.keys, value))
        else:
            left_out.append(leaf.path)
    state = entries.nested(kept, entries.new_places(kept, options.rename))
    if options.format == "dcp":
        return _Plan(dcp_format.output_files(state), build.tensors, {}, left_out)
    return _Plan([OutputFile("", torch_format.parts(state), checksums=True)], build.tensors, {}, left_out)


class _Build:
    """Builds values in which `TensorStub`s stand for tensors. Equal references share one storage."""

    def __init__(self, found: Contents, dtype: str) -> None:
        self._found, self._dtype = found, dtype
        self._stubs: dict[object, TensorStub] = {}
        self._storages: dict[str, Storage] = {}

    @property
    def tensors(self) -> int:
        """The number of different tensors."""
        return len(self._stubs)

    def value(self, node: Any, path: str) -> Any:
        """The value of a node of the tree."""
        if isinstance(node, (TensorRef, ViewRef)):
            if node not in self._stubs:
                self._stubs[node] = self._view(node, path) if isinstance(node, ViewRef) else self._tensor(node, path)
            return self._stubs[node]
        if isinstance(node, (PartsNode, MetaNode)):
            raise UsageError(f"{path}: this kind of tensor cannot be exported", hint=f"--exclude {path!r}")
        if isinstance(node, ValueNode):
            return self._decoded(node, path)
        if isinstance(node, dict):
            return type(node)({key: self.value(value, join(path, key)) for key, value in node.items()})
        if isinstance(node, (list, tuple)):
            return type(node)(self.value(value, join(path, i)) for i, value in enumerate(node))
        return node

    def _decoded(self, node: ValueNode, path: str) -> Any:
        """A value of another type; the node itself if it holds tensors or if its class is not loaded."""
        if any(True for _ in tensor_names(node)):
            return node
        try:
            return plain(node, path)
        except MismatchError:
            return node

    def _tensor(self, node: TensorRef, path: str) -> TensorStub:
        shape, data = _data(self._found, node, path, self._dtype)
        return TensorStub(Storage(data, data.stored_dtype), data.stored_dtype, shape, row_major(shape))

    def _view(self, node: ViewRef, path: str) -> TensorStub:
        if _converted(node.dtype, self._dtype):  # a converted view cannot share its memory
            shape, data = _data(self._found, node, path, self._dtype)
            return TensorStub(Storage(data, data.stored_dtype), data.stored_dtype, shape, row_major(shape))
        saved = self._found.saved(node.name)
        _check_view(node, saved.dtype, saved.shape)
        storage = self._storages.setdefault(node.name, Storage(Data(saved, "uint8", _count(saved.shape)), ""))
        return TensorStub(storage, node.dtype, node.shape, node.stride, node.offset // chunking.ITEM_BYTES[node.dtype])
