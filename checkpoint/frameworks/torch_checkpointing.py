"""Meta's torch_checkpointing: `RepositoryManager(url, run="exp42", config=...)` replaces `CheckpointManager(config)`.

A job of one rank can also use the `Storage` back-end alone:
`CheckpointManager.Config(storage_config=RepositoryStorageConfig(url, run=...))`. With several ranks,
`RepositoryManager` agrees on the attempt with the other ranks.

torch_checkpointing writes files into a folder, and renames the folder when all ranks are done. With this adapter, the
process that writes keeps a rank's files in memory until all are written. It then stores them as this rank's part of a
step, each file as a tensor of bytes. The bytes are stored in chunks, deduplicated against the previous step, and
checked by digest. The step is committed only when all ranks have stored their parts. A checkpoint's name ends in the
step's number. `load("latest", ...)` finds the newest step.

Trust: torch_checkpointing's files are pickles, and it unpickles them when it loads (`torch.load(weights_only=False)`,
`metadata.pkl`). A writer to the repository can therefore run code in the process that loads. The format belongs to
torch_checkpointing, so this adapter cannot refuse it. Load only from repositories whose writers you trust. All other
ways to load (`Checkpointer`, `headrace.checkpoint.dcp`, the other adapters) unpickle nothing from the repository.

Invariant: torch_checkpointing reads back the bytes that it wrote, or gets an error. Until a file is stored, it takes
memory of its own size.

Failure behaviour: errors of `headrace.dataio.core.errors`, or `FileNotFoundError` and `FileExistsError` where
torch_checkpointing expects them. The run's retention removes steps. `rmdir` never does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CallbackArgs
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from headrace.checkpoint.dcp import session
from headrace.checkpoint.dcp.session import RankSave, Ticket, save_rank
from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Box, TensorSpec, whole
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.chunk_reader import Saved, Want
from headrace.checkpoint.state import tree
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import ConflictError, HeadraceError, NotFoundError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

_AGREED = re.compile(r"(\d+)@([0-9a-f]+)$")
_BY = "torch_checkpointing"


@dataclass
class RepositoryStorageConfig(StorageConfig):  # type: ignore[misc, unused-ignore]
    """`url`, `run` and `storage_options` are as for `Checkpointer`.

    The configuration is sent to the writing process, so `url` cannot be an open store.
    """

    url: str
    run: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    timeout: float = 600.0

    def create_storage(self) -> RepositoryStorage:
        return RepositoryStorage(self)


@dataclass(frozen=True, slots=True)
class _Place:
    """A file of a checkpoint, or the checkpoint itself if `name` is "".

    `ticket` is the attempt, if the ranks have agreed on one.
    """

    step: int
    ticket: Ticket | None
    name: str

    @property
    def base(self) -> Base | None:
        return None if self.ticket is None else Base(self.ticket.timeline, self.step, self.ticket.attempt)


class RepositoryStorage(Storage):  # type: ignore[misc, unused-ignore]
    """torch_checkpointing's `Storage` in the repository, for a job of one rank."""

    def __init__(self, config: RepositoryStorageConfig) -> None:
        names.check_run(config.run)
        self._config = config
        self._staged: dict[Path, io.BytesIO] = {}
        self._committed: set[int] = set()

    @property
    def mmap_fill_workers(self) -> int:
        return 1  # this class itself spreads a read over threads

    # writing

    def stream_write(self, path: Path) -> io.IOBase:
        return _Writing(lambda data: self._staged.__setitem__(Path(path), data))

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)

    def finish(self, folder: Path) -> None:
        """Store the files below `folder` as this rank's part of the step. Returns after all ranks have committed it."""
        place, config = _place(folder, is_file=False), self._config
        if place.ticket is None and config.world_size > 1:
            raise UsageError("the ranks have not agreed on an attempt", hint="use RepositoryManager")
        files = {self._name_in(folder, path): data for path, data in self._staged.items() if folder in path.parents}
        tensors = [_tensor(data) for data in files.values()]
        sized = zip(files, tensors, strict=True)
        specs = [TensorSpec(name, "uint8", whole((tensor.numel(),))) for name, tensor in sized]
        with self._store() as store:
            ticket = place.ticket or session.new_ticket(store, config.run, place.step)
            share = RankSave(config.run, place.step, ticket, config.rank, config.world_size, wait=config.timeout)
            save_rank(store, share, tensors, specs, tree.encode({"by": _BY}))
        del tensors
        self.rmdir(folder)
        self._committed.add(place.step)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Rename a file that is being written. For a folder, commit the step, unless `finish` has committed it."""
        if Path(src_path) in self._staged:
            self._staged[Path(dst_path)] = self._staged.pop(Path(src_path))
            return
        if not any(Path(src_path) in file.parents for file in self._staged):
            if _place(src_path, is_file=False).step not in self._committed:
                raise FileNotFoundError(f"no file was written below {src_path}")
            return
        if self._config.world_size > 1:
            raise UsageError(
                "a rank's files were not stored before the folder is renamed",
                hint="use RepositoryManager, or pre_finalize_callback=headrace.checkpoint.frameworks.torch_checkpointing.finish",
            )
        try:
            self.finish(Path(src_path))
        except ConflictError as error:
            raise FileExistsError(str(error)) from error

    def delete(self, path: Path) -> None:
        if self._staged.pop(Path(path), None) is None:
            raise FileNotFoundError(f"{path} is not being written; the files of a step are removed with the step")

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Do nothing, because there are no folders."""

    def rmdir(self, path: Path) -> None:
        """Drop the files that are being written below `path`. Only the run's retention removes a step."""
        self._staged = {file: data for file, data in self._staged.items() if Path(path) not in file.parents}

    # reading

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        if (staged := self._staged.get(Path(path))) is not None:
            return io.BytesIO(staged.getbuffer())  # type: ignore[return-value]
        stack = contextlib.ExitStack()
        try:
            store, opened = stack.enter_context(self._open(path))
            return _Reading(store, opened=opened, saved=self._file(opened, path), stack=stack.pop_all())
        finally:
            stack.close()

    def getsize(self, path: Path) -> int:
        with self.stream_read(path) as stream:
            return stream.seek(0, io.SEEK_END)

    def ls(self, path: Path) -> list[str]:
        with self._open(path, is_file=False) as (_, opened):
            return sorted({name.partition("/")[0] for name in _files(opened)})

    def exists(self, path: Path) -> bool:
        if Path(path) in self._staged or any(Path(path) in file.parents for file in self._staged):
            return True
        try:
            with self._open(path, is_file=_is_file(path)) as (_, opened):
                return not _is_file(path) or _place(path, is_file=True).name in _files(opened)
        except FileNotFoundError:
            return False

    def isdir(self, path: Path) -> bool:
        return not _is_file(path) and self.exists(path)

    def remap_path(self, path: Path) -> str:
        return str(path)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        with open_store(self._config.url, storage_options=self._config.storage_options) as store:
            yield store

    @contextlib.contextmanager
    def _open(self, path: Path, *, is_file: bool = True) -> Iterator[tuple[Store, Step]]:
        place, run = _place(path, is_file=is_file), self._config.run
        with self._store() as store:
            try:
                base = place.base or repository.find(store, run, place.step)
            except NotFoundError as error:
                raise FileNotFoundError(str(error)) from error
            assert base is not None
            with chunk_reader.LeasedStep(store, run, base) as opened:
                yield store, opened

    def _file(self, opened: Step, path: Path) -> Saved:
        saved = _files(opened).get(_place(path, is_file=True).name)
        if saved is None:
            raise FileNotFoundError(f"step {opened.base.step} of run {opened.run} has no file {path}")
        return saved

    @staticmethod
    def _name_in(folder: Path, path: Path) -> str:
        return path.relative_to(folder).as_posix()


class RepositoryManager(CheckpointManager):  # type: ignore[misc, unused-ignore]
    """A `CheckpointManager` with the repository as storage. With several ranks, call `save` and `load` on all of them.

    Args:
        url (str): The repository, as for `Checkpointer`.
        run (str): The run's name.
        config (CheckpointManager.Config | None): The manager's settings. Its storage is replaced. Default: None.
        storage_options (Mapping[str, Any] | None): Options of the store. Default: None.
        timeout (float): The time limit for the other ranks, in seconds. Default: 600.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        config: CheckpointManager.Config | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._ranks, self._run = Ranks.from_environment(None, None), names.check_run(run)
        self._store = open_store(url, storage_options=storage_options)
        config = config or CheckpointManager.Config()
        storage = RepositoryStorageConfig(
            url, run, dict(storage_options or {}), self._ranks.rank, self._ranks.world_size, timeout
        )
        then = functools.partial(_call_then_finish, config.pre_finalize_callback)
        super().__init__(dataclasses.replace(config, storage_config=storage, pre_finalize_callback=then))

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Any:
        """As `CheckpointManager.save`. The checkpoint's name must end in the step's number."""
        step, ticket, error = step_of(checkpoint_id), None, None
        try:
            ticket = session.new_ticket(self._store, self._run, step) if self._ranks.rank == 0 else None
        except Exception as caught:  # of any type: the other ranks must receive it
            error = caught
        agreed = self._ranks.agree(step, msgspec.msgpack.encode(ticket), error)
        return super().save(f"step-{step}@{agreed.hex()}", checkpoint)

    def load(self, checkpoint_id: Any, into: Mapping[str, Any] | None = None, **more: Any) -> Mapping[str, Any]:
        """As `CheckpointManager.load`. The name may be "latest".

        This unpickles files, as the module's docstring warns.
        """
        found_base, error = None, None
        try:
            step = checkpoint_id if checkpoint_id == "latest" else step_of(checkpoint_id)
            found_base = repository.find(self._store, self._run, step) if self._ranks.rank == 0 else None
        except Exception as caught:  # of any type: the other ranks must receive it
            error = caught
        base = msgspec.msgpack.decode(self._ranks.agree(0, msgspec.msgpack.encode(found_base), error), type=Base | None)
        if base is None:
            raise repository.missing(self._store, self._run)
        ticket = Ticket(base.attempt, base.timeline, None)
        loaded: Mapping[str, Any] = super().load(
            f"step-{base.step}@{msgspec.msgpack.encode(ticket).hex()}", into, **more
        )
        session.resume(self._store, self._run, base, latest=checkpoint_id == "latest")
        return loaded

    def close(self) -> None:
        """Close the manager, as `CheckpointManager.close`, and the store."""
        try:
            super().close()
        finally:
            self._store.close()


def finish(args: CallbackArgs) -> None:
    """The `pre_finalize_callback` of a `CheckpointManager` with this storage.

    It runs after this rank has written all of its files.
    """
    args.storage.finish(Path(args.path))


def _call_then_finish(first: Callable[[CallbackArgs], None] | None, args: CallbackArgs) -> None:
    if first is not None:
        first(args)
    finish(args)


class _Writing(io.RawIOBase):
    """A file that is written to memory. Closing it keeps its content, unless the `with` ends in an error."""

    def __init__(self, on_close: Callable[[io.BytesIO], None]) -> None:
        super().__init__()
        self._data, self._on_close = io.BytesIO(), on_close

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._data.write(data)

    def close(self) -> None:
        if not self.closed:
            self._on_close(self._data)
        super().close()

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is not None:
            self._on_close = lambda _: None
        self.close()


class _Reading(io.RawIOBase):
    """A file of a step. The step is leased until the file is closed."""

    def __init__(self, store: Store, *, opened: Step, saved: Saved, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._store, self._opened, self._saved = store, opened, saved
        self._release = Finalizer(self, stack.close)
        self._at, self._size = 0, saved.shape[0]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(min(memoryview(buffer).nbytes, self._size - self._at), 0)
        error = self._fill(memoryview(buffer).cast("B")[:count]) if count else None
        if error is not None:
            raise error
        self._at += count
        return count

    def _fill(self, view: memoryview) -> HeadraceError | None:
        """Read into `view`. Returns an error without its frames, which would keep the caller's memory alive."""
        box = Box((self._size,), (self._at,), (len(view),))
        try:
            chunk_reader.read(self._store, self._opened, [Want(self._saved, box, _MemorySink(view))])
        except HeadraceError as error:
            return error.with_traceback(None)
        return None

    def read(self, size: int | None = -1) -> bytes:
        remaining = max(self._size - self._at, 0)
        data = bytearray(remaining if size is None or size < 0 else min(size, remaining))
        self.readinto(data)
        return bytes(data)

    readall = read

    def close(self) -> None:
        if not self.closed:
            self._release()
        super().close()

    def __del__(self) -> None:
        """Do nothing. The inherited method would close the file during garbage collection."""


@dataclass(frozen=True, slots=True)
class _MemorySink:
    """A `chunk_reader.Sink` for given memory."""

    view: memoryview

    def open(self) -> memoryview:
        return self.view

    def close(self) -> None:
        """Do nothing."""


def _tensor(data: io.BytesIO) -> torch.Tensor:
    view = data.getbuffer()
    return torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)


def _files(opened: Step) -> dict[str, Saved]:
    """The files of every rank, by their names in the checkpoint."""
    return {t.name: Saved(t.name, t.dtype, t.shape, ((m, t),)) for m in opened.manifests for t in m.tensors}


def _is_file(path: Path) -> bool:
    """Whether the path names a file of a checkpoint. The path of a checkpoint ends in its step."""
    return not re.search(r"\d$", Path(path).name) and not _AGREED.search(Path(path).name)


def _place(path: Path, *, is_file: bool) -> _Place:
    parts = Path(path).parts
    for i, part in enumerate(parts):
        if (match := _AGREED.search(part)) is not None:
            ticket = msgspec.msgpack.decode(bytes.fromhex(match[2]), type=Ticket)
            return _Place(int(match[1]), ticket, "/".join(parts[i + 1 :]))
    if is_file:
        return _Place(step_of(parts[-2] if len(parts) > 1 else ""), None, parts[-1])
    return _Place(step_of(Path(path).name), None, "")
