"""What a field gets of a sample, made from the bytes of its files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from headrace.dataio.shards.sample import Member, Sample
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.interfaces import SampleRef


def sample_of(files: Mapping[str, bytes], text: str | None = None, **more: Any) -> Sample:
    """A sample of a shard that holds only these files."""
    begins = itertools.accumulate((len(data) for data in files.values()), initial=0)
    members = tuple(Member(ext, at, len(data), 0) for (ext, data), at in zip(files.items(), begins, strict=False))
    return Sample(0, "a", "0.tar", members, 0.0, text=text, **more)


def input_of(files: Mapping[str, bytes], text: str | None = None) -> FieldInput:
    sample = sample_of(files, text)
    views = {ext: memoryview(data).toreadonly() for ext, data in files.items()}
    return FieldInput(sample, views, SampleRef(0, 0, sample))


def decode(field: Field, data: bytes, text: str | None = None) -> Any:
    """The value that a field makes of its one file."""
    (ext,) = field.files
    return field.decode(input_of({ext: data}, text))
