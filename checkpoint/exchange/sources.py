"""Recognises files and folders of other tools, and describes their contents without reading the tensors.

- a safetensors file, or a folder with one, or with shards and their index (`model.safetensors.index.json`)
- a file of `torch.save`, or a folder with `pytorch_model.bin`, or with shards of it and their index
- an index itself, or the name that the file would have if it were not divided into shards
- the same with the names of diffusers (`diffusion_pytorch_model.safetensors`) and of variants (`model.fp16.safetensors`,
  `model.safetensors.index.fp16.json`). In a folder with several, the one without a variant is meant.
- a folder of torch.distributed.checkpoint (`dcp_source`), or of its writer of safetensors (`hf_shards`)

A tensor of a `Source` is a view of a mapped file, or stands for chunks in several files. It is not read through the
map: `FileSlices` finds its place in the files, and reads it from there.
Invariant: no pickled code runs. Files of `torch.save` are read with `weights_only=True`, and DCP's `.metadata` by a reader
that builds plain values only. An index or a `.metadata` names only files of its own folder. A link in a folder leads only
into that folder, or into the blobs of a Hugging Face cache. One of several shards is never imported as the whole.
Failure behaviour: `UsageError` for a source that is not recognised, `UnsupportedError` for one that would run code,
`CorruptionError` for a damaged one. Each names the file and the next step.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import stat
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.exchange import dcp_source, hf_shards, safetensors_format, torch_source
from headrace.checkpoint.exchange.dcp_metadata import METADATA
from headrace.checkpoint.exchange.joined_tensors import JoinedTensors
from headrace.checkpoint.exchange.safetensors_format import INDEX_SUFFIX, StoredTensor
from headrace.checkpoint.state.fit import Selection
from headrace.checkpoint.state.tensors import empty
from headrace.dataio.core.errors import (
    CorruptionError,
    NotFoundError,
    UsageError,
)
from headrace.dataio.core.limits import MIB

_MAX_INDEX = 64 * MIB
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = re.compile(r".+\.(?P<kind>safetensors|bin)\.index(\.[^.]+)?\.json")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<variant>\.[^.]+)?\.(?P<kind>safetensors|bin)")
"""The variant follows the number in files of older releases of diffusers, and the stem in all others."""
_BIN = re.compile(r"(diffusion_)?pytorch_model(\.[^.]+)?\.bin")
_OF_PIPELINE = "model_index.json"
_MOST_NAMED = 8


@dataclass
class Source:
    """What is imported. `state` is the nested state, or tensors by name if `is_flat`.

    `files`: open files by (device, inode). `format`: "safetensors", "hf", "torch" or "dcp". `joined`: reads the tensors
    whose bytes are in several files. `left_out`: entries that were excluded before they were read.
    """

    format: str
    state: dict[Any, Any]
    is_flat: bool
    joined: JoinedTensors | None = None
    left_out: list[str] = field(default_factory=list)
    files: dict[tuple[int, int], int] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


def open_source(path: Path, stack: contextlib.ExitStack, selection: Selection) -> Source:
    """Recognise a file or folder. Its files stay open until `stack` is closed.

    Entries of a folder of DCP that `selection` excludes are not read. Other formats are read whole.
    """
    path = _index_of_missing(path)
    files = _Files(stack)
    if path.is_dir() and (path / METADATA).exists():
        return Source("dcp", *dcp_source.load(path, _inside, stack, selection))
    if path.is_dir():
        return _of_folder(path, files, stack=stack)
    if not path.is_file():
        raise UsageError(f"{path} is not a regular file", hint="give a file or a folder")
    if _INDEX.fullmatch(path.name):
        return _of_folder(path.parent, files, path.name, stack=stack)
    _refuse_shard(path.parent, path.name)
    if torch_source.is_zip(path):
        return _of_torch(path, files)
    if path.suffix in _TORCH_SUFFIXES:
        raise torch_source.not_a_zip(path)
    return _of_safetensors("safetensors", [path], files)


def _index_of_missing(path: Path) -> Path:
    """The path, or the index of its shards if there are only these. So the name of an export is that of an import."""
    if path.exists():
        return path
    for name in _index_names(path.stem, path.suffix.removeprefix(".")):
        if _INDEX.fullmatch(name) and (path.parent / name).exists():
            return path.parent / name
    raise NotFoundError(f"{path} does not exist", hint="check the path; a model of a hub must be downloaded first")


def _index_names(stem: str, kind: str) -> list[str]:
    """The names that the index of the model STEM.KIND may have. A stem such as "model.fp16" ends in a variant."""
    base, _, variant = stem.rpartition(".")
    return [f"{stem}.{kind}.index.json", *([f"{base}.{kind}.index.{variant}.json"] if base else [])]


def _refuse_shard(folder: Path, name: str) -> None:
    """Raise `UsageError` for one of several shards. Shards of DCP's writer are refused by `hf_shards.refuse_alone`."""
    shard = _SHARD.fullmatch(name)
    if shard is None or int(shard["count"]) < 2 or hf_shards.NAME.fullmatch(name):
        return
    indexes = _index_names(shard["stem"] + (shard["variant"] or ""), shard["kind"])
    hint = f"copy or download all of them, and their index {indexes[-1]}"
    if present := [name for name in indexes if (folder / name).exists()]:
        hint = f"import {folder / present[0]}, which names all of them"
    problem = f"{folder / name} is one of {int(shard['count'])} files, and has only a part of the tensors"
    raise UsageError(problem, hint=hint)


class _Files:
    """Opens and maps files. `opened`: their descriptors by (device, inode)."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.opened: dict[tuple[int, int], int] = {}

    def open(self, path: Path) -> int:
        """Open a regular file for reading."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._stack.callback(os.close, fd)
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"{path} is not a regular file", hint="give a file or a folder")
        self.opened[about.st_dev, about.st_ino] = fd
        return fd


def _of_folder(folder: Path, files: _Files, index: str = "", *, stack: contextlib.ExitStack) -> Source:
    names = sorted(os.listdir(folder))
    shards = [name for name in names if hf_shards.NAME.fullmatch(name)]
    if shards and not index and not any(name.endswith(INDEX_SUFFIX) for name in names):
        joined = hf_shards.load([_inside(folder, name) for name in shards], stack)
        return Source("hf", dict(joined.tensors), True, joined)
    chosen = index or _model_in(folder, names)
    is_index = _INDEX.fullmatch(chosen)
    if is_index and is_index["kind"] == "bin":
        return _of_bins(folder, chosen, files)
    if is_index:
        return _of_safetensors("hf", *_indexed(folder, chosen, files))
    _refuse_shard(folder, chosen)
    if chosen.endswith(".bin"):
        return _of_torch(_inside(folder, chosen), files)
    return _of_safetensors("hf", [_inside(folder, chosen)], files)


def _model_in(folder: Path, names: list[str]) -> str:
    """The file or index in a folder that is imported: one with a default name, or the only one of its kind."""
    stems = ("model", "diffusion_pytorch_model")
    defaults = [f"{stem}.safetensors{end}" for stem in stems for end in ("", ".index.json")]
    defaults_of_bins = [
        f"{prefix}pytorch_model.bin{end}" for prefix in ("", "diffusion_") for end in (".index.json", "")
    ]
    indexes = {name: found["kind"] for name in names if (found := _INDEX.fullmatch(name))}
    models = [
        [name for name, kind in indexes.items() if kind == "safetensors"],
        [name for name in names if name.endswith(".safetensors")],
        [name for name, kind in indexes.items() if kind == "bin"],
        [name for name in names if _BIN.fullmatch(name)],
    ]
    safetensors, bins = models[:2], models[2:]
    for named, kinds in ((defaults, safetensors), (defaults_of_bins, bins)):
        if present := [name for name in named if name in names]:
            return present[0]
        if single := [found[0] for found in kinds if len(found) == 1]:
            return single[0]
    raise _unclear(folder, names, [name for found in models for name in found if not _SHARD.fullmatch(name)])


def _unclear(folder: Path, names: list[str], models: list[str]) -> UsageError:
    """The error for a folder without a model, or with several."""
    for name in [] if models else names:
        _refuse_shard(folder, name)
    if models:
        problem = f"{folder} has several models, and none of them has a default name: {', '.join(models[:_MOST_NAMED])}"
        return UsageError(problem, hint=f"name the one to import, such as {folder / models[0]}")
    if _OF_PIPELINE in names:
        return UsageError(
            f"{folder} is a pipeline of diffusers, which has a folder for each model",
            hint=f"import its models one by one, such as {folder / 'unet'}",
        )
    found = ", ".join(names[:_MOST_NAMED]) or "nothing"
    return UsageError(
        f"{folder} is not recognised: it has no safetensors file or index, and no pytorch_model.bin ({found})",
        hint="give the file itself, or the folder of one model",
    )


def _inside(folder: Path, name: str) -> Path:
    """The file of this name in the folder. A name with a path, and a link that leads elsewhere, are refused."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CorruptionError(
            f"{folder}: the index names {name!r:.200}, which is not a file of this folder", hint="download it again"
        )
    path = folder / name
    if not path.exists():
        raise NotFoundError(f"{path} does not exist", hint="a shard is missing: download it again")
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    allowed = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    if real.parent not in allowed:
        raise UsageError(
            f"{path} is a link to {real}, outside its folder", hint="give that file itself, if you trust the link"
        )
    return real


def _read_index(folder: Path, name: str) -> dict[str, str]:
    """The file of each tensor, as an index says it."""
    path = _inside(folder, name)
    if path.stat().st_size > _MAX_INDEX:
        raise CorruptionError(f"{path} has more than {_MAX_INDEX} bytes", hint="download it again")
    try:
        places = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(f"{path} is not an index: {error!s:.200}", hint="download it again") from None
    if not isinstance(places, dict) or not places or not all(isinstance(each, str) for each in places.values()):
        raise CorruptionError(f"{path} is not an index: weight_map is malformed", hint="download it again")
    return places


def _indexed(folder: Path, index: str, files: _Files) -> tuple[list[Path], _Files, dict[str, str]]:
    places = _read_index(folder, index)
    return [_inside(folder, name) for name in dict.fromkeys(places.values())], files, places


def _of_safetensors(format: str, paths: list[Path], files: _Files, places: dict[str, str] | None = None) -> Source:
    tensors: dict[Any, Any] = {}
    metadata: dict[str, str] = {}
    shards = list(dict.fromkeys(places.values())) if places is not None else [path.name for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        fd = files.open(path)
        header = safetensors_format.read_header(fd, str(path))
        _check_shard(path, header.tensors, tensors, places, shard)
        hf_shards.refuse_alone(path, header.metadata)
        tensors |= _mapped(fd, header.tensors)
        metadata |= header.metadata
    if not tensors:
        raise UsageError(f"{paths[0]} holds no tensors", hint="give another file")
    tied = {name: kept for name, kept in metadata.items() if kept in tensors and name not in tensors}
    return Source(format, tensors, True, files=files.opened, tied=tied)


def _check_shard(
    path: Path, found: list[StoredTensor], before: dict[Any, Any], places: dict[str, str] | None, shard: str
) -> None:
    """Compare the tensors of a shard with the index, and with earlier shards."""
    names = {tensor.name for tensor in found}
    if repeated := sorted(names & before.keys()):
        raise CorruptionError(f"{path}: tensor {repeated[0]!r:.200} is in another shard too", hint="download it again")
    if places is not None:
        expected = {name for name, file in places.items() if file == shard}
        if expected != names:
            name = sorted(expected ^ names)[0]
            raise CorruptionError(
                f"{path}: the index and the shard disagree about tensor {name!r:.200}", hint="download all files again"
            )


def _mapped(fd: int, found: list[StoredTensor]) -> dict[str, torch.Tensor]:
    """The tensors as views of the mapped file. The map is read-only, so a file may be larger than the memory."""
    memory = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ)
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        for tensor in found:
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            if tensor.nbytes:
                flat = torch.frombuffer(memory, dtype=dtype, count=tensor.nbytes // dtype.itemsize, offset=tensor.at)
                tensors[tensor.name] = flat.view(tensor.shape)
            else:
                tensors[tensor.name] = empty(dtype, tensor.shape)
    return tensors


def _of_torch(path: Path, files: _Files) -> Source:
    state, is_flat = torch_source.load(path, files.open(path))
    return Source("torch", state, is_flat, files=files.opened)


def _of_bins(folder: Path, index: str, files: _Files) -> Source:
    places = _read_index(folder, index)
    state: dict[Any, Any] = {}
    for name in dict.fromkeys(places.values()):
        path = _inside(folder, name)
        shard, is_flat = torch_source.load(path, files.open(path))
        if not is_flat or state.keys() & shard.keys():
            problem = f"{path}: not a shard of tensors, or one is in another shard too"
            raise CorruptionError(problem, hint="download all files again")
        state |= shard
    if state.keys() != places.keys():
        name = sorted(map(str, state.keys() ^ places.keys()))[0]
        raise CorruptionError(
            f"{folder}: the index and the shards disagree about tensor {name!r:.200}", hint="download all files again"
        )
    return Source("torch", state, True, files=files.opened)
