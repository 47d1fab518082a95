"""The data of the loader benchmark: kinds of files, their location, and the formats for each loader.

A `Kind` defines the files and the samples of an epoch. A `Source` is the location of the files: this machine, or an S3
server that counts the bytes it sends. `video`, `audio` and `images` define the kinds.

Invariants: both sources have the same bytes. A library that supports S3 reads from the server itself. The others get
short files whole, over one connection for each thread, and long files as file objects. Each format of the files is
written under another name and renamed when it is complete.

Failure behaviour: `RuntimeError` for an HTTP status other than 200, and for a tool that fails to write its format.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headrace.bench.core.measure import Progress, command_of

if TYPE_CHECKING:
    import torch

OURS, FLOOR = "headrace", "floor: our decoder alone"


class Peer(NamedTuple):
    """A candidate: a function of (source, kind) that yields batches, and the packages that it needs."""

    run: Callable[..., Iterator[torch.Tensor]]
    packages: tuple[str, ...] = ()


class Kind(Protocol):
    """One kind of data: the files, and the samples of an epoch."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> str:
        """The folder of the files. Two kinds may share one."""

    @property
    def per_file(self) -> int:
        """The number of samples of each file in an epoch."""

    @property
    def long_files(self) -> bool:
        """Whether files are long, so that readers seek in them."""

    @property
    def batch(self) -> int:
        """Files of a batch, for a loader that decodes all samples of a file together."""

    @property
    def buffer(self) -> int:
        """Size of a shuffle buffer, in files."""

    @property
    def default(self) -> int:
        """The default number of samples of an epoch."""

    @property
    def shard_bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample that a candidate delivers."""

    @property
    def dtype(self) -> str: ...
    def described(self, files: int) -> str:
        """Return one line that describes an epoch."""

    def write(self, folder: Path, count: int, progress: Progress) -> None:
        """Write `count` files."""

    def ours(self) -> dict[str, Peer]:
        """Headrace's candidates and the floors."""

    def peers(self) -> dict[str, Peer]:
        """The other candidates."""


# --- where the files are

_thread = threading.local()


@dataclass(frozen=True)
class Source:
    """The files of a kind in all formats.

    `folder` has clips/, dataset/ and litdata/. With a `port`, they are read from the local server at that port. The
    server's bucket has the name of the folder.
    """

    folder: Path
    port: int = 0

    @property
    def _http(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.folder.name}"

    def url(self, name: str) -> str:
        """Return the path or the URL of a subfolder, in the form that libraries accept."""
        return f"s3://{self.folder.name}/{name}" if self.port else str(self.folder / name)

    def shards(self) -> list[str]:
        """Return the paths or URLs of the tars, in the form that webdataset accepts."""
        names = sorted(path.name for path in (self.folder / "dataset" / "shards").iterdir())
        base = f"{self._http}/dataset/shards" if self.port else str(self.folder / "dataset" / "shards")
        return [f"{base}/{name}" for name in names]

    def files(self) -> list[str]:
        """Return the names of the files. They are listed locally, so no candidate needs a listing over S3."""
        return sorted(path.name for path in (self.folder / "clips").iterdir())

    def read(self, name: str) -> bytes:
        """Return the bytes of one file."""
        if not self.port:
            return (self.folder / "clips" / name).read_bytes()
        connection: http.client.HTTPConnection | None = getattr(_thread, "connection", None)
        if connection is None:
            connection = _thread.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/{self.folder.name}/clips/{name}")
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"GET {name}: {answer.status}")
        return data

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """Yield a path or, from S3, a file object of s3fs.

        The blocks are 1 MiB. The default of s3fs, 50 MiB, would read whole long videos.
        """
        if not self.port:
            yield str(self.folder / "clips" / name)
            return
        import s3fs

        with s3fs.S3FileSystem().open(f"{self.folder.name}/clips/{name}", "rb", block_size=1 << 20) as file:
            yield file

    def link(self, name: str) -> str:
        """Return a path, or an HTTP URL like a presigned URL of S3."""
        return f"{self._http}/clips/{name}" if self.port else str(self.folder / "clips" / name)

    def bytes_sent(self) -> int:
        """Return the bytes that the server has sent so far, or 0 without a server."""
        if not self.port:
            return 0
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/sent", timeout=30) as answer:
            return int(answer.read())


def close_connections_at_fork() -> None:
    """Make this process close its connections before it forks.

    Workers of Energon and mosaicml-streaming would share the parent's connections. Two workers that send requests over
    one connection get each other's bytes.
    """
    os.register_at_fork(before=_close_connections)


def _close_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)  # a client reconnects when its connection has ended


def batches(name: str, source: Source, kind: Kind) -> Iterator[torch.Tensor]:
    """Return the batches of the candidate `name`."""
    return (kind.ours() | kind.peers())[name].run(source, kind)


# --- making the files


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Write a folder atomically: yield a folder, and rename it to `target` when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.making")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make(kind: Kind, folder: Path, count: int, progress: Progress) -> None:
    """Write `count` files to `folder`/clips, unless they exist, and a dataset of them to `folder`/dataset."""
    from headrace.dataio import pack

    if not (folder / "clips").is_dir():
        with atomic_folder(folder / "clips") as clips:
            clips.mkdir()
            kind.write(clips, count, progress)
    with atomic_folder(folder / "dataset") as dataset:
        pack([str(folder / "clips")], str(dataset), shard_bytes=kind.shard_bytes).close()


def repeat_files(folder: Path, ext: str, count: int, distinct: int, write: Callable[[Path, int], None]) -> None:
    """Write `count` files of which the first `distinct` differ, and the others are links to them."""
    for number in range(count):
        path = folder / f"{number:05}.{ext}"
        if number < distinct:
            write(path, number)
        else:
            os.link(folder / f"{number % distinct:05}.{ext}", path)


def to_litdata(kind: Kind, folder: Path) -> None:
    """Write the files' bytes into litdata's chunks."""
    paths = sorted(str(path) for path in (folder / "clips").iterdir())
    with atomic_folder(folder / "litdata") as target:
        write_litdata(_file_row, paths, target, f"{kind.shard_bytes >> 20}MB")


def _file_row(path: str) -> dict[str, Any]:
    return {"file": Path(path).read_bytes()}


def write_litdata(read: Callable[[Any], Any], inputs: list[Any], target: Path, chunk_bytes: str) -> None:
    """Write `read(input)` of all inputs into litdata's chunks in `target`, with one process.

    litdata's temporary files are written to a scratch folder. By default, litdata empties the folders `data` and
    `chunks` of the system's temporary folder.
    """
    from headrace.bench.core.processes import environment_variables

    library: Any = importlib.import_module("litdata")
    with tempfile.TemporaryDirectory(prefix="headrace-litdata-", dir=target.parent) as scratch:
        folders = {
            "DATA_OPTIMIZER_CACHE_FOLDER": f"{scratch}/chunks",
            "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{scratch}/data",
        }
        with environment_variables(folders):
            library.optimize(read, inputs=inputs, output_dir=str(target), chunk_bytes=chunk_bytes, num_workers=1)


def to_energon(folder: Path, python: str) -> None:
    """Write the index that Energon needs, next to hard links of our tars."""
    index_for_energon(folder / "dataset" / "shards", folder / "energon", python)


def index_for_energon(shards: Path, folder: Path, python: str) -> None:
    """Write Energon's index of the tars in `shards` to `folder`, next to hard links of them."""
    options = ("--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1")
    with atomic_folder(folder) as target:
        target.mkdir()
        for shard in shards.iterdir():
            os.link(shard, target / shard.name)
        command = [python, "-m", "megatron.energon.cli.main", "prepare", str(target), *options]
        _require_success(command, "energon prepare")


def to_mosaic(kind: Kind, folder: Path, python: str) -> None:
    """Write the files' bytes into mosaicml's shards, with an interpreter that has mosaicml-streaming installed."""
    with atomic_folder(folder / "mosaic") as target:
        arguments = str(folder / "clips"), str(target), kind.shard_bytes
        _require_success(command_of(f"{__name__}:write_mds", *arguments, python=python), "MDSWriter")


def write_mds(clips: str, target: str, shard_bytes: int) -> None:
    """Write all files of the folder `clips` into mosaicml's shards in `target`."""
    streaming: Any = importlib.import_module("streaming")
    with streaming.MDSWriter(out=target, columns={"file": "bytes"}, size_limit=shard_bytes) as out:
        for path in sorted(Path(clips).iterdir()):
            out.write({"file": path.read_bytes()})


def _require_success(command: list[str], name: str) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(f"{name}: {completed.stderr[-500:]}")


@functools.cache
def ffmpeg_libraries(folder: Path) -> Path:
    """Make a folder where torchcodec and SPDL find PyAV's FFmpeg, so that all candidates use the same build."""
    import av

    target = folder / "ffmpeg"
    target.mkdir(exist_ok=True)
    for library in (Path(av.__file__).parents[1] / "av.libs").iterdir():
        plain = re.sub(r"-[0-9a-f]{8}(?=\.so)", "", library.name)
        plain = re.sub(r"(\.so\.\d+)[.\d]*$", r"\1", plain)
        for name in (library.name, plain):
            if not (target / name).exists():
                (target / name).symlink_to(library)
    return target
