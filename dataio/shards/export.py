"""Writes members of samples as files.

Invariants:

* A key is a name, never a path. Every file goes into the one folder that the user named.
* In a file's name, letters and digits and the characters of `_PLAIN` stay as they are. Other characters become `%XX`.
  Long names are shortened and end in a hash. Different members never share a name.
* Each file is written atomically, after its checksum was verified.
* An existing file is replaced only on request, and links are not followed.

Failure behaviour: an existing file raises `ConflictError`, which names it. A damaged member raises `CorruptionError`.
Files that were written before stay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from headrace.dataio.core import files
from headrace.dataio.core.errors import ConflictError, HeadraceError, NotFoundError, from_os_error
from headrace.dataio.shards import member_reader
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import Member, Sample

_NAME_BYTES = 200
_PLAIN = frozenset("-_.+=,@")


def export(
    dataset: Dataset,
    keys: Iterable[str],
    folder: str | os.PathLike[str],
    *,
    ext: str | None = None,
    force: bool = False,
) -> Iterator[tuple[str, Path]]:
    """Write the files of samples into a folder.

    Args:
        dataset (Dataset): The dataset or view.
        keys (Iterable[str]): The keys of the samples.
        folder (str | os.PathLike[str]): The folder, which is made if it does not exist.
        ext (str | None): Write only files with this extension. Default: None, which writes all files.
        force (bool): Whether to replace existing files. Default: False.

    Yields:
        tuple[str, Path]: `key.ext` and the path, for each file that was written.

    Raises:
        NotFoundError: A sample or its file does not exist. No file of that sample was written.
        ConflictError: A file exists already, and `force` is False.
        CorruptionError: A file's checksum does not match.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConflictError(f"{target} exists and is not a folder", hint="name another folder") from error
    except OSError as error:
        raise _os_error(target, error) from error
    for key in keys:
        sample = dataset.find(key)
        for member in sample.members if ext is None else (member_reader.find_member(sample, ext),):
            path = target / safe_name(sample.key, member.ext)
            _write(dataset, sample, member, path, force)
            yield f"{sample.key}.{member.ext}", path


def safe_name(key: str, ext: str) -> str:
    """Return a file name for a member. Different members get different names, and no name leads out of its folder."""
    name = "".join(c if c.isalnum() or c in _PLAIN else _escaped(c) for c in f"{key}.{ext}")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name.encode()) > _NAME_BYTES:
        suffix = f"%{xxhash.xxh3_128_hexdigest(f'{key}.{ext}'.encode())}"
        if len(ext) < 16 and ext.isalnum():
            suffix += f".{ext}"
        name = name.encode()[: _NAME_BYTES - len(suffix.encode())].decode(errors="ignore") + suffix
    return name


def _escaped(c: str) -> str:
    return "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))


def _write(dataset: Dataset, sample: Sample, member: Member, path: Path, force: bool) -> None:
    if not force and os.path.lexists(path):
        raise _exists(path)
    with name_path_in_errors(path), files.write_atomically(path, replace=force) as file:
        for piece in member_reader.read_chunks(dataset.store, sample, member):
            file.write(piece)


@contextlib.contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` from writing `path` into a `HeadraceError`."""
    try:
        yield
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise _os_error(path, error) from error


def _exists(path: Path) -> ConflictError:
    return ConflictError(f"{path} exists already", hint="--force replaces it; or export into another folder")


def _os_error(path: Path, error: OSError) -> HeadraceError:
    if isinstance(error, FileNotFoundError):
        return NotFoundError(
            f"writing {path}: its folder does not exist", hint="make the folder first, or name another"
        )
    return from_os_error(error, f"writing {path}")
