"""What the converters of this folder share: write samples to WebDataset tars, index the tars, and compare both ends.

Each shard of the source becomes one tar below `tars/` of the dataset. A tar appears when it is complete. So a converter
that was interrupted continues with the next tar when its command is given again. One sample is in memory at a time.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import numpy as np

from headrace import Dataset, index, open_store
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UsageError
from headrace.dataio.store.base import Store

PIECE = 8 << 20
MOST_PRINTED = 100
Sample = tuple[str, Mapping[str, bytes]]
"""The key of a sample, and its files by extension."""


@dataclass(frozen=True)
class SourceShard:
    """One shard of the source.

    Args:
        name (str): The name of its tar, without `.tar`. Names must sort in the order of the samples.
        samples (Callable): Reads the samples from the beginning.
    """

    name: str
    samples: Callable[[], Iterator[Sample]]


def convert(shards: Iterable[SourceShard], url: str, *, text_field: str | None = None) -> Dataset:
    """Write the tars that are missing, index them where they lie, and open the dataset."""
    with open_store(url) as store:
        present = {info.key for info in store.list("tars/")}
        for shard in shards:
            key = f"tars/{shard.name}.tar"
            if key not in present:
                size = store.put_multipart(key, tar_parts(shard.samples()))
                print(f"{key}: {size} bytes", flush=True)
    dataset = index(f"{url.rstrip('/')}/tars/*.tar", url, layout="tars", follow=True, text_field=text_field)
    print_skipped(dataset)
    print(f"version {dataset.version}: {len(dataset)} samples")
    return dataset


def print_skipped(dataset: Dataset) -> bool:
    """Print what could not be indexed, and return whether there was anything."""
    skipped = dataset.report.skipped if dataset.report is not None else ()
    for each in skipped:
        print(f"skipped {each.path}: {each.reason}", file=sys.stderr)
    return bool(skipped)


def finish(shards: Iterable[SourceShard], dataset: Dataset, check: bool) -> NoReturn:
    """Compare both ends if `check`, and end with exit code 0, or 1 if a sample is missing or differs."""
    complete = not (dataset.report and dataset.report.skipped)
    if check:
        complete = compare((sample for shard in shards for sample in shard.samples()), dataset)
    sys.exit(0 if complete else 1)


def tar_parts(samples: Iterable[Sample]) -> Iterator[bytes]:
    """The bytes of a tar, a sample at a time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for key, files in samples:
            for ext, data in files.items():
                info = tarfile.TarInfo(f"{key}.{ext}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def compare(samples: Iterable[Sample], dataset: Dataset) -> bool:
    """Compare all bytes of the source with those of the dataset, and print the outcome.

    Both must have the same order. Samples that only one side has are counted, and the others are compared. Reading a file
    of the dataset also checks its digest.

    Args:
        samples (Iterable[Sample]): The samples of the source.
        dataset (Dataset): The dataset. Its keys may have the name of the tar in front (`index(keys="shard")`).

    Returns:
        bool: Whether both have the same samples with the same files.
    """
    ours, equal, total, problems = _Position(dataset), 0, 0, _Problems()
    for key, files in samples:
        key = key.removeprefix("./")
        if not ours.is_at(key) and not ours.is_later(key):
            problems.add(f"{key} is missing")
            continue
        while not ours.is_at(key):
            problems.add(f"{ours.advance().key} is not in the source")
        sample = ours.advance()
        try:
            stored = {member.ext: dataset.read(sample, member.ext) for member in sample.members}
        except HeadraceError as error:
            problems.add(f"{key} cannot be read: {error}")
            continue
        if stored == dict(files):
            equal, total = equal + 1, total + sum(map(len, stored.values()))
        else:
            problems.add(f"{key} differs")
    while ours.sample is not None:
        problems.add(f"{ours.advance().key} is not in the source")
    print(f"{equal} samples with {total} bytes are equal; {problems.count} are not")
    problems.print()
    return not problems.count


class _Position:
    """Walks through the samples of a dataset. `sample`: the next one; None at the end."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._samples = dataset, iter(dataset)
        self._numbers: dict[str, int] | None = None
        self.sample = next(self._samples, None)

    def is_at(self, key: str) -> bool:
        """Whether the next sample has this key, perhaps with the name of its tar in front."""
        return self.sample is not None and f"/{self.sample.key}".endswith(f"/{key}")

    def is_later(self, key: str) -> bool:
        """Whether a later sample has this key. Reads all keys in the first call."""
        if self._numbers is None:
            self._numbers = {key.removeprefix("./"): number for number, key in enumerate(self._dataset.keys)}
        return self.sample is not None and self._numbers.get(key, -1) > self.sample.id

    def advance(self) -> Any:
        """The next sample. The one after it becomes the next."""
        assert self.sample is not None
        sample, self.sample = self.sample, next(self._samples, None)
        return sample


class _Problems:
    """Counts problems, and keeps the first ones to print them."""

    def __init__(self) -> None:
        self.count, self._first = 0, list[str]()

    def add(self, problem: str) -> None:
        self.count += 1
        if len(self._first) < MOST_PRINTED:
            self._first.append(problem)

    def print(self) -> None:
        for line in self._first:
            print(line, file=sys.stderr)
        if self.count > len(self._first):
            print(f"and {self.count - len(self._first)} more", file=sys.stderr)


@contextmanager
def local_copy(
    store: Store, key: str, open_raw: Callable[[IO[bytes]], IO[bytes]] | None = None, raw_bytes: int = 0
) -> Iterator[IO[bytes]]:
    """A copy of an object in a temporary file. `open_raw` decompresses it, to at most `raw_bytes`.

    Raises:
        CorruptionError: It has more bytes than that when it is decompressed.
    """
    size = store.stat(key).size
    with tempfile.TemporaryFile() as file:
        for start in range(0, size, PIECE):
            store.get_into(key, start, part := memoryview(bytearray(min(PIECE, size - start))))
            file.write(part)
        file.seek(0)
        if open_raw is None:
            yield file
            return
        with tempfile.TemporaryFile() as raw, open_raw(file) as reader:
            while part_of_raw := reader.read(PIECE):
                raw.write(part_of_raw)
                if raw.tell() > raw_bytes:
                    raise CorruptionError(f"{key} decompresses to more than the {raw_bytes} bytes of index.json")
            raw.seek(0)
            yield raw


def read_exactly(file: IO[bytes], start: int, end: int) -> bytes:
    """The bytes [start, end) of a file.

    Raises:
        CorruptionError: The file ends before.
    """
    file.seek(start)
    data = file.read(end - start) if end >= start else b""
    if len(data) != end - start:
        raise CorruptionError(f"a shard has no bytes {start} to {end}", hint="copy the shard again, it is cut off")
    return data


def extensions(options: Iterable[str]) -> dict[str, str]:
    """Parse `COLUMN=EXTENSION` options.

    Raises:
        UsageError: An option has another form.
    """
    for option in options:
        if not re.fullmatch(r"[^=]+=[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", option):
            raise UsageError(f"--file {option}: not of the form COLUMN=EXTENSION", hint="for example --file video=mp4")
    return dict(option.split("=", 1) for option in options)


def choose_extensions(kinds: Mapping[str, str | None], chosen: Mapping[str, str]) -> dict[str, str]:
    """Choose the extension of each column that becomes a file.

    Args:
        kinds (Mapping): Each of these columns with the extension of its format, or None if the source does not say
            which format it has.
        chosen (Mapping): The extensions that the user chose.

    Returns:
        dict[str, str]: The first column of a format has that extension. Further ones, and all arrays ("npy"), have
            their name before it.

    Raises:
        UsageError: A column has no extension, or two columns have the same one.
    """
    if unknown := sorted(chosen.keys() - kinds.keys()):
        raise UsageError(f"--file names {', '.join(unknown)}, which the source does not have as bytes")
    if missing := [name for name, ext in kinds.items() if ext is None and name not in chosen]:
        hint = " ".join(f"--file {name}=EXTENSION" for name in missing)
        raise UsageError("the source does not say which format these bytes have", hint=f"add {hint}")
    found, taken = dict[str, str](), {"json"}  # the fields are in `json`
    for name, ext in kinds.items():
        long = f"{re.sub('[^A-Za-z0-9_]+', '_', name)}.{ext}"
        found[name] = (chosen.get(name) or (long if ext in taken or ext == "npy" else ext) or "").lower()
        if found[name] in taken:
            raise UsageError(f"two files have the extension {found[name]}", hint=f"choose one: --file {name}=...")
        taken.add(found[name])
    return found


def json_of(fields: Mapping[str, Any]) -> bytes:
    """The fields of a sample as JSON. JSON has no NaN and no infinity: they become the texts "nan", "inf" and "-inf"."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(dict(fields)), ensure_ascii=False, allow_nan=False).encode()


def npy_of(array: Any) -> bytes:
    """An array as a `.npy` file."""
    np.save(out := io.BytesIO(), np.asarray(array), allow_pickle=False)
    return out.getvalue()
