"""`Mixture`: several datasets as one, by weights.

Purpose: the description that a loader takes in place of a dataset, and opening what it names.
Invariants: sources are known by their names, which are part of the order and of the loader's state; the order in which they
are given is not. What was opened here is closed by whoever opened it, also when a later source cannot be opened.
Failure behaviour: `UsageError` for an impossible mixture; what opening a dataset raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset

if TYPE_CHECKING:
    from headrace.loaders.order.mixture import Weights

MAX_NAME = 64
Place = str | os.PathLike[str] | Dataset


@dataclass(frozen=True)
class Mixture:
    """Datasets, views (`dataset.where(...)`) or URLs, by name, and the weights by which samples are taken from them.

    `weights` (by name) default to the numbers of clips; shares are proportional to weight ** (1 / temperature), so a high
    temperature favours small sources. A list of (step, weights), the first at step 0, is a curriculum: steps are global
    batches since the start of the run. Each source has its own epochs: a small one begins again while others go on.

    The mixture's own epoch, after which a `for` loop ends, has `epoch_batches` batches, by default as many as all sources'
    clips fill once.
    """

    sources: Mapping[str, Place]
    weights: Weights | Sequence[tuple[int, Weights]] | None = None
    temperature: float = 1.0
    epoch_batches: int | None = None

    def __post_init__(self) -> None:
        if not self.sources or not isinstance(self.sources, Mapping):
            raise UsageError(
                "a mixture without sources by name", hint='give datasets by name: Mixture({"a": ..., "b": ...})'
            )
        for name in self.sources:
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
                raise UsageError(f"{name!r} is no name of a source", hint=f"use 1 to {MAX_NAME} characters")
        object.__setattr__(self, "sources", dict(sorted(self.sources.items())))
        from headrace.loaders.order.mixture import length_of, segments_of

        weights = dict.fromkeys(self.sources, 1.0) if self.weights is None else self.weights
        segments_of(tuple(self.sources), weights, self.temperature)
        length_of(self.epoch_batches, 1)


class Opened(msgspec.Struct, frozen=True):
    """What a loader reads: datasets by name (one, named "", without a mixture), and those that are its own to close."""

    datasets: Mapping[str, Dataset]
    mixture: Mixture | None = None
    owned: list[Dataset] = []

    def close(self) -> None:
        for dataset in self.owned:
            dataset.close()


def opened(
    source: Place | Mixture, version: int | str | None, options: Mapping[str, Any] | None, trust_mounts: bool = False
) -> Opened:
    """Everything that `source` names, opened. `version` is a number or a tag and goes with one URL, the others with URLs."""
    mixture = source if isinstance(source, Mixture) else None
    places = {"": source} if not isinstance(source, Mixture) else source.sources
    if mixture is not None and version is not None:
        raise UsageError("version goes with one URL, not with a mixture", hint="give it Dataset(url, version=...)")
    made, owned = dict[str, Dataset](), list[Dataset]()
    try:
        for name, place in places.items():
            made[name] = _one(place, version, options, trust_mounts, owned)
    except BaseException:
        Opened(made, mixture, owned).close()
        raise
    return Opened(made, mixture, owned)


def _one(
    place: Place,
    version: int | str | None,
    options: Mapping[str, Any] | None,
    trust_mounts: bool,
    owned: list[Dataset],
) -> Dataset:
    given: object = place
    if not isinstance(given, str | os.PathLike | Dataset):
        raise UsageError(f"{given!r} is no dataset", hint="give its URL or folder, or an open Dataset")
    if not isinstance(place, Dataset):
        owned.append(Dataset.at_once(os.fspath(place), version, trust_mounts=trust_mounts, **(options or {})))
        return owned[-1]
    if options or version not in (None, place.version):
        raise UsageError(
            "version and storage_options go with a URL, not with a dataset that is open already", hint="open it so"
        )
    return place
