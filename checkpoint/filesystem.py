"""`headrace://`: steps and samples as read-only files of fsspec, for pandas, pyarrow and other tools.

    headrace://<repository>/runs/<run>/steps/<step>/tensors/<path>.safetensors
    headrace://<repository>/runs/<run>/steps/<step>/artifacts/<name>
    headrace://<dataset>/samples/<version>/<key>/<key>.<ext>

`<repository>` and `<dataset>` are URLs with percent-encoding (`s3%3A%2F%2Fbucket%2Fckpt`). With the option `url`, paths
begin after them. `<step>` is a number, `latest` or `tag:NAME`; `<version>` is a number, a tag or `latest`.

Invariants: nothing is written but the lease that every reader of a step holds. All bytes were checked against their
digests. Names from stored documents are percent-encoded, so no path contains `.`, `..` or an empty part. A file of at
most `SMALL_BYTES` is read as a whole; a larger tensor is read by rows.
Failure behaviour: `FileNotFoundError` for a path that does not exist, `PermissionError` for writing. `CapacityError` for
a folder with more than `MOST_NAMES` names. Other errors are those of Headrace, such as `CorruptionError`.
"""

from __future__ import annotations

import contextlib
import io
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from fsspec.spec import AbstractFileSystem

from headrace.checkpoint import artifacts
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.restoring.saved_step import SavedStep, read
from headrace.checkpoint.tensor_file import TensorFile, data_bytes, header_of, raw
from headrace.dataio.core.errors import CapacityError, NotFoundError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store

SMALL_BYTES = 64 * MIB
MOST_NAMES = 100_000
KEPT_STEPS, KEPT_SECONDS = 8, 60.0
"""How many listings of steps are kept, and for how long. `latest` may be that old in a listing."""
_SUFFIX = ".safetensors"
_LATEST = "latest"
_FOLDERS = {"tensors", "artifacts"}


@dataclass(frozen=True, slots=True)
class _Names:
    """The files of a folder with their sizes, and its folders."""

    files: Mapping[str, int]
    folders: Sequence[str]


def encoded(name: str) -> str:
    """A name as one part of a path. An empty name is `%`, which no other name is."""
    text = urllib.parse.quote(name, safe=" !$'()+,;=@[]{}~:")
    return (text.replace(".", "%2E") if not text.strip(".") else text) or "%"


class HeadraceFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A read-only file system over one repository or dataset, or over all.

    Args:
        url (str | None): The repository or dataset in which paths begin. Default: None, the first part of each path
            names it.
        store_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.
        trust_mounts (bool): Whether a dataset may refer to other stores. Default: False.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer
        >>> folder = tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     _ = checkpointer.save(1, {"model": {"weight": torch.arange(4)}}).result(timeout=60)
        >>> HeadraceFileSystem(url=folder).ls("runs/exp42/steps/1/tensors/model", detail=False)
        ['runs/exp42/steps/1/tensors/model/weight.safetensors']
    """

    protocol = "headrace"
    root_marker = ""

    def __init__(
        self,
        url: str | None = None,
        *,
        store_options: Mapping[str, Any] | None = None,
        trust_mounts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._url, self._store_options, self._trust_mounts = url, store_options, trust_mounts
        self._listed: OrderedDict[tuple[str, str, str], tuple[float, dict[str, int]]] = OrderedDict()

    # what fsspec calls

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entries = [self.info(path)]
        if entries[0]["type"] == "directory":
            with _as_os_errors(path):
                found = self._names(*self._place(path))
            prefix = f"{path}/" if path else ""
            entries = [_entry(prefix + folder, None) for folder in found.folders]
            entries += [_entry(prefix + name, size) for name, size in found.files.items()]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with _as_os_errors(path):
            url, parts = self._place(path)
            if _may_be_file(parts):
                files = self._names(url, parts[:-1]).files
                if parts[-1] in files:
                    return _entry(path, files[parts[-1]])
            self._names(url, parts)
        return _entry(path, None)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            self._refuse(path)
        with _as_os_errors(path):
            url, parts = self._place(path)
            if _may_be_file(parts) and parts[0] == "runs":
                return self._open_in_step(path, url, parts, block_size, options)
            if _may_be_file(parts):
                return io.BytesIO(self._sample_file(url, parts))
            if self.isdir(path):
                raise IsADirectoryError(f"{path} is a folder")
            raise NotFoundError(f"{path} does not exist")

    def _refuse(self, path: str, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(f"{path}: headrace:// is read-only; save with a Checkpointer, or use `headrace pack`")

    mkdir = makedirs = rmdir = rm_file = cp_file = touch = pipe_file = put_file = _refuse

    # places

    def _place(self, path: str) -> tuple[str, list[str]]:
        """The URL of the store, and the parts of the path below it."""
        parts = [part for part in path.split("/") if part]
        if self._url is not None:
            return self._url, parts
        if not parts:
            raise UsageError("headrace:// needs a repository", hint="headrace://s3%3A%2F%2Fbucket%2Fckpt/runs, or url=")
        return urllib.parse.unquote(parts[0]), parts[1:]

    def _names(self, url: str, parts: Sequence[str]) -> _Names:
        """The names in a folder. `NotFoundError` if there is no such folder."""
        match list(parts):
            case []:
                return _Names({}, ["samples" if self._is_dataset(url) else "runs"])
            case ["runs"]:
                with self._store(url) as store:
                    return _folders(repository.runs(store, MOST_NAMES + 1))
            case ["runs", run]:
                self._names(url, ["runs", run, "steps"])
                return _Names({}, ["steps"])
            case ["runs", run, "steps"]:
                return self._steps(url, urllib.parse.unquote(run))
            case ["runs", run, "steps", step]:
                self._step(url, run, step)
                return _Names({}, sorted(_FOLDERS))
            case ["runs", run, "steps", step, kind, *below] if kind in _FOLDERS:
                return _below("/".join([kind, *below]), self._step(url, run, step))
            case ["samples", *below]:
                return self._samples(url, below)
        raise NotFoundError(f"{'/'.join(parts)} does not exist", hint="see docs/howto/fsspec.md for the paths")

    @contextlib.contextmanager
    def _store(self, url: str) -> Iterator[Any]:
        with open_store(url, storage_options=self._store_options) as store:
            yield store

    def _is_dataset(self, url: str) -> bool:
        with self._store(url) as store:
            return bool(store.exists("dataset.json"))

    # checkpoints

    def _steps(self, url: str, run: str) -> _Names:
        if not names.is_run(run):
            raise NotFoundError(f"{run!r:.200} cannot name a run")
        with self._store(url) as store:
            if repository.read_repo(store) is None:
                raise NotFoundError(f"{url} is not a repository")
            found = _folders(str(base.step) for base in repository.visible(store, run))
            if not found.folders and run not in repository.runs(store, MOST_NAMES):
                raise NotFoundError(f"there is no run {run!r:.200}")
        return found

    def _step(self, url: str, run: str, step: str) -> dict[str, int]:
        """The files of a step by their paths, with their sizes."""
        key, now = (url, run, step), time.monotonic()
        kept = self._listed.get(key)
        if kept is None or now - kept[0] > KEPT_SECONDS:
            kept = now, self._list_step(url, urllib.parse.unquote(run), step)
            self._listed[key] = kept
            while len(self._listed) > KEPT_STEPS:
                self._listed.popitem(last=False)
        return kept[1]

    def _list_step(self, url: str, run: str, step: str) -> dict[str, int]:
        files: dict[str, int] = {}
        with self._store(url) as store:
            with self._saved(store, run, step) as saved:
                for path in saved:
                    tensor = saved[path] if saved.is_tensor(path) else None
                    if tensor is not None and (header := header_of(path, tensor)) is not None:
                        files[f"tensors/{_tensor_path(path)}"] = len(header) + data_bytes(tensor)
            with artifacts.open_leased(store, run, _number_or_name(step)) as opened:
                for artifact in artifacts.artifacts_of(opened):
                    files.setdefault(f"artifacts/{_encoded_path(artifact.name)}", artifact.bytes)
        if len(files) > MOST_NAMES:
            raise CapacityError(f"step {step} has {len(files)} files", hint="read it by headrace.checkpoint.read")
        return files

    def _saved(self, store: Any, run: str, step: str) -> SavedStep:
        name = _number_or_name(step)
        if isinstance(name, str) and name.startswith("tag:"):
            return read(store, run=run, tag=name.removeprefix("tag:"))
        return read(store, run=run, step=name)

    def _open_in_step(self, path: str, url: str, parts: list[str], block_size: int | None, options: Any) -> Any:
        run, step, kind = urllib.parse.unquote(parts[1]), parts[3], parts[4]
        name = "/".join(map(urllib.parse.unquote, parts[5:]))
        if kind == "artifacts":
            with self._store(url) as store, artifacts.open_leased(store, run, _number_or_name(step)) as opened:
                return io.BytesIO(artifacts.read_bytes(store, opened, name))
        wanted = "/".join(parts[5:])
        with contextlib.ExitStack() as stack:
            saved = stack.enter_context(self._saved(stack.enter_context(self._store(url)), run, step))
            found = next((entry for entry in saved if saved.is_tensor(entry) and _tensor_path(entry) == wanted), None)
            header = header_of(found, saved[found]) if found is not None else None
            if found is None or header is None:
                raise NotFoundError(f"{path} does not exist")
            tensor = saved[found]
            if len(header) + data_bytes(tensor) <= SMALL_BYTES:
                return io.BytesIO(header + raw(tensor.read()))
            return TensorFile(self, path, tensor, header, stack.pop_all(), block_size, options)

    # datasets

    def _dataset(self, url: str, version: str) -> Any:
        from headrace.dataio.shards.dataset import Dataset

        wanted = _number_or_name(version)
        return Dataset.open_lazy(
            url,
            None if wanted == _LATEST else wanted,
            trust_mounts=self._trust_mounts,
            storage_options=self._store_options,
        )

    def _samples(self, url: str, below: Sequence[str]) -> _Names:
        if not below:
            self._dataset(url, _LATEST).close()
            return _Names({}, [_LATEST])
        if len(below) > 2:
            raise NotFoundError(f"samples/{'/'.join(below)} is not a folder")
        with self._dataset(url, below[0]) as dataset:
            if len(below) == 1:
                if len(dataset) > MOST_NAMES:
                    hint = "name a sample by its key; `headrace ls` lists the keys"
                    raise CapacityError(f"{url} has {len(dataset)} samples, too many for a listing", hint=hint)
                return _Names({}, [encoded(key) for key in dataset.keys])
            sample = dataset.find(urllib.parse.unquote(below[1]))
            return _Names({f"{below[1]}.{encoded(member.ext)}": member.length for member in sample.members}, [])

    def _sample_file(self, url: str, parts: Sequence[str]) -> bytes:
        _, version, key, name = parts
        if not name.startswith(f"{key}."):
            raise NotFoundError(f"{name} does not begin with the sample's key")
        with self._dataset(url, version) as dataset:
            sample = dataset.find(urllib.parse.unquote(key))
            data: bytes = dataset.read(sample, urllib.parse.unquote(name[len(key) + 1 :]))
            return data


def _may_be_file(parts: Sequence[str]) -> bool:
    return (len(parts) == 4 and parts[0] == "samples") or (len(parts) > 5 and parts[0] == "runs")


def _number_or_name(text: str) -> int | str:
    text = urllib.parse.unquote(text)
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 20 else text


def _encoded_path(path: str) -> str:
    return "/".join(map(encoded, path.split("/")))


def _tensor_path(entry: str) -> str:
    """The path of an entry's file. A slash in a key of the state is `~1` in the entry, so it stays one part."""
    return _encoded_path(entry) + _SUFFIX


def _below(folder: str, files: Mapping[str, int]) -> _Names:
    """The names in a folder of a step. Only `tensors` and `artifacts` exist without files."""
    inside = {path[len(folder) + 1 :]: size for path, size in files.items() if path.startswith(f"{folder}/")}
    if not inside and folder not in _FOLDERS:
        raise NotFoundError(f"the step has no folder {folder}")
    folders = sorted({path.partition("/")[0] for path in inside if "/" in path})
    return _Names({path: size for path, size in inside.items() if "/" not in path}, folders)


def _folders(listed: Any) -> _Names:
    found = [encoded(name) for name in listed]
    if len(found) > MOST_NAMES:
        raise CapacityError(
            f"more than {MOST_NAMES} names", hint="name the run and the step; `headrace ckpt ls` lists them"
        )
    return _Names({}, sorted(found, key=lambda name: (len(name), name) if name.isdecimal() else (0, name)))


def _entry(path: str, size: int | None) -> dict[str, Any]:
    return {"name": path, "size": size or 0, "type": "directory" if size is None else "file"}


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """Raise `FileNotFoundError` for `NotFoundError`, as callers of fsspec expect."""
    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError(f"{path}: {error.message}") from error
