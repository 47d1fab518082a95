"""Reads a folder of torch.distributed.checkpoint (DCP): its metadata, and the places of its tensors and values.

Each file of the folder has archives of `torch.save`, one after the other. An archive holds a chunk of a tensor, or
another value. Tensors are not read: `JoinedTensors` reads their bytes later.
Invariant: no pickled code runs. `.metadata` is read by `pickle_reader`, values by `weights_only=True`. Each archive lies
in its file, and each chunk has the type and the size that the metadata says. Values of at most `MAX_VALUE_BYTES` are in
memory, one after the other.
Failure behaviour: `UnsupportedError` for a value that needs code; the hint says how to leave it out. `CorruptionError`
for metadata that is damaged or that does not fit the files.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from headrace.checkpoint.exchange import dcp_metadata, entries, torch_source
from headrace.checkpoint.exchange.dcp_metadata import METADATA, Chunk, Contents, Slice
from headrace.checkpoint.exchange.joined_tensors import (
    MAX_COPIED_BYTES,
    ChunkFile,
    JoinedTensor,
    JoinedTensors,
    OpenFiles,
    is_contiguous,
    is_dense,
)
from headrace.checkpoint.format.chunking import ITEM_BYTES, Box
from headrace.checkpoint.restoring import dcp_names
from headrace.checkpoint.state.fit import Selection
from headrace.checkpoint.state.tensors import name_of
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.core.limits import MIB, check_memory, format_bytes

MAX_VALUE_BYTES = 256 * MIB
"""The largest value that is not a tensor."""
MAX_SHARING = 64
"""The most bytes of tensors for each byte of the files. Tensors that share memory share the bytes of a file."""
_READ_BYTES = 64 << 10
_CONVERT = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"

Inside = Callable[[Path, str], Path]


def load(
    folder: Path, inside: Inside, stack: contextlib.ExitStack, selection: Selection
) -> tuple[dict[Any, Any], bool, JoinedTensors, list[str]]:
    """The state in a folder, whether all of it are tensors by name, the reader of their bytes, and what is excluded.

    `inside` returns the path of a file in the folder, or refuses it. The reader works until `stack` is closed.
    """
    files = OpenFiles(stack)
    everything = _metadata(inside(folder, METADATA), files)
    found = _chosen(everything, selection)
    excluded = {**everything.tensors, **everything.values}.keys() - {**found.tensors, **found.values}.keys()
    paths = {name: inside(folder, name) for name in sorted(_files(found))}
    reading = _Folder(folder, paths, files)
    if sum(map(_nbytes, found.tensors.values())) > MAX_SHARING * sum(map(files.size, paths.values())):
        raise CorruptionError(f"{folder}: the tensors have {MAX_SHARING} times more bytes than the files")
    joined = JoinedTensors({name: reading.tensor(name, tensor) for name, tensor in found.tensors.items()}, files)
    values = {name: reading.value(name, place) for name, place in found.values.items()}
    state = dcp_names.nested(dcp_names.Names({}, {**joined.tensors, **values}, found.paths))
    is_flat = not values and state.keys() == joined.tensors.keys()
    return state, is_flat, joined, sorted(_path(found, name) for name in excluded)


def _metadata(path: Path, files: OpenFiles) -> Contents:
    size = files.size(path)
    if size > dcp_metadata.MAX_BYTES:
        raise UnsupportedError(
            f"{path} has {format_bytes(size)}, and at most {format_bytes(dcp_metadata.MAX_BYTES)} are read",
            hint=f"convert it where you trust it: {_CONVERT}",
        )
    check_memory(size, str(path))
    try:
        return dcp_metadata.read_metadata(_bytes(files.fd(path), 0, size))
    except HeadraceError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint or "copy or download it again") from None


def _chosen(found: Contents, selection: Selection) -> Contents:
    """The contents without the entries that the caller excludes."""

    def is_chosen(name: str) -> bool:
        return selection.selects(_path(found, name))

    tensors = {name: tensor for name, tensor in found.tensors.items() if is_chosen(name)}
    values = {name: place for name, place in found.values.items() if is_chosen(name)}
    if not tensors and not values:
        raise UsageError("the folder holds no entries, or all of them are excluded", hint="check the patterns")
    return Contents(tensors, values, found.paths)


def _path(found: Contents, name: str) -> str:
    return entries.join_all(found.paths.get(name, (name,)))


def _files(found: Contents) -> Iterator[str]:
    """The names of the files that hold the contents, once or more."""
    for tensor in found.tensors.values():
        yield from (chunk.place.file for chunk in tensor.chunks)
    yield from (place.file for place in found.values.values())


def _nbytes(tensor: dcp_metadata.StoredTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


class _Folder:
    """The files of a folder. `paths`: by their names."""

    def __init__(self, folder: Path, paths: dict[str, Path], files: OpenFiles) -> None:
        self._folder, self._paths, self._files = folder, paths, files

    def tensor(self, name: str, stored: dcp_metadata.StoredTensor) -> JoinedTensor:
        """A tensor whose chunks have their places in the files."""
        chunks = [self._chunk(name, stored, chunk) for chunk in stored.chunks]
        return JoinedTensor(stored.dtype, stored.shape, chunks)

    def _chunk(self, name: str, stored: dcp_metadata.StoredTensor, chunk: Chunk) -> ChunkFile:
        label = f"{self._folder}: {name!r:.200} in {chunk.place.file}"
        fd = self._fd(label, chunk.place)
        with _archive(fd, chunk.place) as archive:
            found = torch_source.locate_tensor(label, archive, chunk.place.length)
        if (name_of(found.dtype), found.shape) != (stored.dtype, chunk.local):
            raise CorruptionError(
                f"{label} is a {name_of(found.dtype)} tensor of shape {list(found.shape)}; the metadata says"
                f" {stored.dtype} and {list(chunk.local)}",
                hint="copy or download all files again",
            )
        box = Box(stored.shape, chunk.offset, chunk.local)
        if is_contiguous(found.shape, found.stride):
            return ChunkFile(box, self._paths[chunk.place.file], chunk.place.at + found.at)
        size = math.prod(found.shape) * ITEM_BYTES[stored.dtype]
        if not is_dense(found.shape, found.stride) or size > MAX_COPIED_BYTES:
            raise UnsupportedError(
                f"{label} has {format_bytes(size)} that are not contiguous", hint="save contiguous() of the tensor"
            )
        return ChunkFile(box, self._paths[chunk.place.file], chunk.place.at + found.at, found.stride)

    def value(self, name: str, place: Slice) -> Any:
        """A value that is not a tensor."""
        label = f"{self._folder}: {name!r:.200} in {place.file}"
        if place.length > MAX_VALUE_BYTES:
            raise UnsupportedError(
                f"{label} has {format_bytes(place.length)}; at most {format_bytes(MAX_VALUE_BYTES)} are read",
                hint=f"leave it out: --exclude {name!r:.200}",
            )
        check_memory(place.length, label)
        data = _bytes(self._fd(label, place), place.at, place.length)
        try:
            return torch_source.load_value(label, data)
        except UnsupportedError as error:
            hint = f"leave it out with --exclude, or convert the folder where you trust it: {_CONVERT}"
            raise UnsupportedError(error.message, hint=hint) from None

    def _fd(self, label: str, place: Slice) -> int:
        """The descriptor of the file, if the slice lies in it."""
        path = self._paths[place.file]
        if place.at + place.length > (size := self._files.size(path)):
            raise CorruptionError(
                f"{label} ends at byte {place.at + place.length}, and the file has {size} bytes",
                hint="copy or download it again",
            )
        return self._files.fd(path)


def _archive(fd: int, place: Slice) -> BinaryIO:
    """The archive as a file. A small one is read at once."""
    if place.length <= _READ_BYTES:
        return io.BytesIO(_bytes(fd, place.at, place.length))
    return io.BufferedReader(_SliceFile(fd, place), 4096)


def _bytes(fd: int, at: int, length: int) -> bytes:
    data = bytearray(length)
    done = 0
    while done < length:
        count = os.preadv(fd, [memoryview(data)[done:]], at + done)
        if not count:
            raise CorruptionError(f"the file ends at byte {at + done}, before an archive does")
        done += count
    return bytes(data)


class _SliceFile(io.RawIOBase):
    """A part of an open file, as a file that can be read."""

    def __init__(self, fd: int, place: Slice) -> None:
        self._fd, self._place, self._at = fd, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.length}[whence]
        if start + offset < 0:
            raise ValueError("a position before the start of the archive")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._place.length - self._at, 0)]
        count = os.preadv(self._fd, [view], self._place.at + self._at) if len(view) else 0
        self._at += count
        return count
