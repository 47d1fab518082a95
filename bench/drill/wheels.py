"""Wheels for a machine without a network: fetched, made smaller, split into pieces, copied, joined and installed.

The module uses only the standard library, because it runs before any package is installed. The packages that most parts
need come first. A wheel can be joined as soon as all of its pieces have arrived, so the first piece alone is useful.

Invariants: a wheel is used only if its SHA-256 equals the one in the manifest. Pieces have at most `PIECE_BYTES`. File
names are taken from the manifest and checked: no folders, only wheels and pieces.

Failure behaviour: `DrillError` names the file and the next step.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PIECE_BYTES = 50 << 20
"""The largest size of a piece. A checkout, real clips and a piece together stay below 64 MiB."""
MANIFEST = "manifest.json"
_MARK = "installed.json"
NEEDED = (
    *("msgspec", "blake3", "zstandard", "xxhash", "prometheus-client", "fsspec", "rich", "numpy", "pyarrow", "shtab"),
    *("duckdb", "simplejpeg", "av"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
    "nvidia-dali-cuda130",
)
"""The packages that Headrace imports on a GPU machine in addition to torch, in the order in which they are copied.

First come the packages for states, clips and tests, and then DALI. Dependencies come before DALI. The drill uses no
stores on a network, so it needs no packages for them.
"""
_UNUSED = re.compile(r"nvidia_(libnvcomp|nvimgcodec|nvjpeg|nvjpeg2k|nvtiff)[_-]")
"""Libraries that DALI opens only for images and packed arrays."""
_OTHERS = re.compile(r"\.cpython-(\d+t?)-[a-z0-9_-]+\.so$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,180}\.whl")
_PIECE = re.compile(r"[0-9]{4}\.piece")
_GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)


class DrillError(Exception):
    """The drill cannot continue. The message has the next step."""


def fetch(folder: Path, constraints: Path, python: str = "3.12", requirements: Sequence[str] = NEEDED) -> list[Path]:
    """Download wheels for CPython `python` on manylinux x86-64, dependencies too, without torch."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", python, "--implementation", "cp", "--constraint", str(constraints)]
    command += [part for name in platforms for part in ("--platform", name)]
    completed = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if completed.returncode:
        raise DrillError(f"pip could not fetch the wheels: {completed.stderr.strip()[-800:]}")
    return in_order(path for path in folder.glob("*.whl") if not _UNUSED.match(path.name))


def in_order(wheels: Iterable[Path]) -> list[Path]:
    """Sort wheels in the order of `NEEDED`. Dependencies come before its last package, small ones first."""
    return sorted(wheels, key=lambda path: (_place(path), path.stat().st_size))


def _place(wheel: Path) -> float:
    names = [name.replace("-", "_") for name in NEEDED]
    return names.index(_distribution(wheel)) if _distribution(wheel) in names else len(names) - 1.5


def _distribution(wheel: Path) -> str:
    return wheel.name.split("-")[0].lower()


def smaller(wheel: Path, folder: Path, python: str) -> Path:
    """Repack the wheel with stronger compression, without files for other Python versions.

    pip installs it like any other wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, ours = folder / wheel.name, python.replace(".", "")
    partial = target.with_suffix(".partial")
    if not target.exists():
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(partial, "w", zipfile.ZIP_LZMA) as packed:
            for entry in source.infolist():
                other = _OTHERS.search(entry.filename)
                if other is None or other[1] == ours:
                    packed.writestr(entry, source.read(entry), zipfile.ZIP_LZMA)
        partial.replace(target)
    return target


def split(wheels: Sequence[Path], pieces: Path, most: int = PIECE_BYTES) -> dict[str, Any]:
    """Concatenate all wheels, cut the result into pieces of `most` bytes, and return the manifest."""
    pieces.mkdir(parents=True, exist_ok=True)
    for old in pieces.glob("*.piece"):
        old.unlink()
    table: list[dict[str, Any]] = []
    digests: list[dict[str, Any]] = []
    writer = _Pieces(pieces, most, digests)
    for wheel in wheels:
        digest, size = hashlib.sha256(), 0
        with wheel.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
                writer.write(block)
        table.append({"name": wheel.name, "bytes": size, "sha256": digest.hexdigest()})
    writer.close()
    manifest = {"wheels": table, "pieces": digests}
    (pieces / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


class _Pieces:
    """Writes a stream into files of at most `most` bytes."""

    def __init__(self, folder: Path, most: int, table: list[dict[str, Any]]) -> None:
        self._folder, self._most, self._table = folder, most, table
        self._buffer = bytearray()

    def write(self, block: bytes) -> None:
        self._buffer += block
        while len(self._buffer) >= self._most:
            self._write_piece(self._most)

    def close(self) -> None:
        if self._buffer:
            self._write_piece(len(self._buffer))

    def _write_piece(self, size: int) -> None:
        name, data = f"{len(self._table):04d}.piece", bytes(self._buffer[:size])
        (self._folder / name).write_bytes(data)
        self._table.append({"name": name, "bytes": size, "sha256": hashlib.sha256(data).hexdigest()})
        del self._buffer[:size]


def missing(pieces: Path) -> list[str]:
    """Return the pieces that are missing or incomplete."""
    return [entry["name"] for entry in _manifest(pieces)["pieces"] if not _is_complete(pieces, entry)]


def _is_complete(pieces: Path, entry: dict[str, Any]) -> bool:
    path, digest = pieces / entry["name"], str(entry["sha256"])
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == digest


def join(pieces: Path, folder: Path) -> list[Path]:
    """Write all wheels with complete pieces to `folder`, and check every digest."""
    manifest, lacking, start, at = _manifest(pieces), set(missing(pieces)), 0, 0
    bounds = []
    for entry in manifest["pieces"]:
        bounds.append((entry["name"], start, start := start + int(entry["bytes"])))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for entry in manifest["wheels"]:
        end = at + int(entry["bytes"])
        touched = [(name, begins) for name, begins, ends in bounds if begins < end and at < ends]
        if not lacking.intersection(name for name, _ in touched):
            source = _Stream([pieces / name for name, _ in touched])
            source.skip(at - touched[0][1] if touched else 0)
            written.append(_write_wheel(source, entry, folder))
        at = end
    return written


def _write_wheel(source: _Stream, entry: dict[str, Any], folder: Path) -> Path:
    path, digest, remaining = folder / str(entry["name"]), hashlib.sha256(), int(entry["bytes"])
    with path.open("wb") as file:
        while remaining:
            block = source.read(min(remaining, 1 << 20))
            digest.update(block)
            file.write(block)
            remaining -= len(block)
    if digest.hexdigest() != entry["sha256"]:
        path.unlink()
        raise DrillError(f"{entry['name']} does not have the digest in the manifest: fetch and split again")
    return path


class _Stream:
    """Reads files one after the other."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths, self._buffer = list(paths), b""

    def skip(self, size: int) -> None:
        while size:
            size -= len(self.read(size))

    def read(self, size: int) -> bytes:
        if not self._buffer:
            if not self._paths:
                raise DrillError("the pieces hold less than the manifest says: fetch and split again")
            self._buffer = self._paths.pop(0).read_bytes()
        out, self._buffer = self._buffer[:size], self._buffer[size:]
        return out


def _manifest(pieces: Path) -> dict[str, Any]:
    """Read the manifest, and check that its names are plain file names and its sizes are valid."""
    try:
        manifest: dict[str, Any] = json.loads((pieces / MANIFEST).read_text())
        entries = [(entry, _NAME) for entry in manifest["wheels"]] + [(entry, _PIECE) for entry in manifest["pieces"]]
        for entry, pattern in entries:
            if (
                not pattern.fullmatch(entry["name"])
                or not 0 <= int(entry["bytes"]) < 1 << 33
                or len(entry["sha256"]) != 64
            ):
                raise DrillError(
                    f"{pieces / MANIFEST} names {str(entry['name'])[:80]!r}, which is no wheel and no piece"
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DrillError(
            f"{pieces / MANIFEST} cannot be used ({error}): run `gpu_drill.py fetch` where there is a network"
        ) from None
    return manifest


def install(wheels: Sequence[Path], site: Path) -> list[str]:
    """Install the missing packages into `site`, and return the names of their wheels.

    Packages that the machine has, such as torch and numpy, stay as they are.
    """
    missing_wheels = [wheel for wheel in wheels if not _installed(wheel)]
    if missing_wheels:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--no-cache-dir", "--upgrade", "--target", str(site), *map(str, missing_wheels)]
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode:
            raise DrillError(f"pip could not install the wheels: {completed.stderr.strip()[-800:]}")
    return [wheel.name for wheel in missing_wheels]


def is_installed(pieces: Path, site: Path) -> bool:
    """Return whether all pieces that have arrived were installed into `site` before."""
    try:
        return bool(json.loads((site / _MARK).read_text()) == _complete_digests(pieces))
    except (OSError, ValueError):
        return False


def note_installed(pieces: Path, site: Path) -> None:
    """Record in `site` that these pieces are installed, for later starts."""
    site.mkdir(parents=True, exist_ok=True)
    (site / _MARK).write_text(json.dumps(_complete_digests(pieces)))


def _complete_digests(pieces: Path) -> list[str]:
    """Return the digests of the pieces that have arrived completely."""
    return [str(entry["sha256"]) for entry in _manifest(pieces)["pieces"] if _is_complete(pieces, entry)]


def register(project: Path, site: Path) -> None:
    """Register the project's name and version with this Python, as if it were installed.

    The code runs from the checkout.
    """
    import tomllib

    about = tomllib.loads(project.read_text())["project"]
    folder = site / f"{about['name']}-{about['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (folder / "METADATA").write_text(text)


def _installed(wheel: Path) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(wheel.name.split("-")[0].replace("_", "-")))
    except PackageNotFoundError:
        return False
