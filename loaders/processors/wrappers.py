"""Wrappers that extend any processor: columns of the index, source names, log-mel spectrograms, the user's transform.

Purpose: each feature that all loaders share is implemented once.
Invariants: a wrapper's results depend only on the sample and its `SampleRef`. The transform gets a generator seeded
from the `SampleRef`. So a resumed run draws the same numbers, and so does a run with another world size. Spectrograms
depend on the audio alone; on a GPU, DALI computes them if it is installed.
Failure behaviour: an error of the user's transform is raised with a note that names the sample. The sample does not
count as damaged. `UsageError` for an unknown column names the known ones. All other errors come from the wrapped
processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError, UsageError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.core.suggestions import did_you_mean
from headrace.dataio.shards.sample import Sample
from headrace.loaders.decode.dali import gpu_count
from headrace.loaders.interfaces import FetchedSample, Needs, ProcessedSample, Processor, SampleLayout, SampleRef

if TYPE_CHECKING:
    from headrace.loaders.audio.spec import AudioSpec

_TRANSFORM = 25  # distinguishes the generator's seed from all other random streams
_CAPTION, _FIELD = "caption", "fields."
_NO_TEXT = (
    "columns has 'caption', and the index has no text of samples whose JSON has a caption: index or pack again, "
    "or use columns=['fields.caption']"
)
_TWO_MEANINGS = "columns has {0!r}: the loader delivers the index's column; the JSON's field is 'fields.{0}'"
_RESERVED = frozenset(
    ["id", "key", "text", "video", "audio", "mel", "clip", "start", "audio_samples", "source", "bucket"]
)
_log = get_logger(__name__)
Tensors = Mapping[str, torch.Tensor]
Transform = Callable[[dict[str, torch.Tensor], torch.Generator], Tensors]


class ProcessorWrapper:
    """A processor that delegates to `inner` and extends its results."""

    def __init__(self, inner: Processor) -> None:
        self._inner = inner

    @property
    def layout(self) -> SampleLayout:
        return self._inner.layout

    def needs(self, ref: SampleRef) -> Needs:
        return self._inner.needs(ref)

    def cost(self, sample: Sample) -> int:
        return self._inner.cost(sample)

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        results = self._inner.process(self._inputs(fetched))
        return [
            result if isinstance(result, HeadraceError) else self._extend(one.ref, result)
            for one, result in zip(fetched, results, strict=True)
        ]

    def close(self) -> None:
        self._inner.close()

    def _inputs(self, fetched: Sequence[FetchedSample]) -> Sequence[FetchedSample]:
        """The samples that the inner processor receives."""
        return fetched

    def _extend(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        raise NotImplementedError


class WithColumns(ProcessorWrapper):
    """Adds columns of the index, or promoted fields of the samples' JSON, to every batch. A missing value is None.

    "caption" is the sample's text. "fields.NAME" is the field NAME, which may have the name of a column.
    """

    def __init__(self, inner: Processor, columns: Sequence[str]) -> None:
        from headrace.dataio.shards.index.rows import to_row  # imports Arrow, which only loaders with columns need

        super().__init__(inner)
        self._columns, self._row = tuple(columns), to_row

    @property
    def layout(self) -> SampleLayout:
        inner = self._inner.layout
        return replace(inner, numbers={**inner.numbers, **dict.fromkeys(self._columns)})

    def _extend(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        sample = finished.sample
        row = {**self._row(sample), _CAPTION: sample.text}
        fields = {**{f"{_FIELD}{name}": value for name, value in sample.fields.items()}, **sample.fields}
        columns = {name: row[name] if name in row else fields.get(name) for name in self._columns}
        if _CAPTION in columns and sample.text is None and isinstance(sample.fields.get(_CAPTION), str):
            warn_once(_log, _NO_TEXT, per="job")
        return replace(finished, values={**finished.values, **columns})


def check_columns(columns: Sequence[str], fields: Mapping[str, object], url: str) -> tuple[str, ...]:
    """Return `columns` without duplicates. `fields` are the promoted fields of samples.

    Raise `UsageError` if a column does not exist, or has the name of another entry of the batches.
    """
    known = known_columns(fields)
    of_index = set(known[: len(known) - len(fields)])
    for name in columns:
        if name in _RESERVED:
            raise UsageError(f"columns cannot hold {name!r}: batches have something of that name", hint="leave it out")
        if name in of_index and name in fields and name != _CAPTION:
            warn_once(_log, _TWO_MEANINGS.format(name), per="job")
        if name not in known and not (name.startswith(_FIELD) and name.removeprefix(_FIELD) in fields):
            raise UsageError(
                f"{url} has no column {name!r}{did_you_mean(name, known)}", hint=f"there are {', '.join(sorted(known))}"
            )
    return tuple(dict.fromkeys(columns))


class Transformed(ProcessorWrapper):
    """Calls `transform(tensors, generator)` for every sample, in the thread that decoded it.

    The batch holds the returned tensors.
    """

    def __init__(self, inner: Processor, transform: Transform) -> None:
        super().__init__(inner)
        self._transform = transform

    def _inputs(self, fetched: Sequence[FetchedSample]) -> Sequence[FetchedSample]:
        """Withhold the batch's memory: tensors that the transform keeps, or returns as views, must own their memory."""
        return [replace(one, target=None) for one in fetched]

    def _extend(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        try:
            returned: object = self._transform(dict(finished.tensors), transform_generator(ref))
            tensors = dict(returned) if isinstance(returned, Mapping) else {}
        except Exception as error:
            error.add_note(f"in the loader's transform, for sample {finished.sample.key!r}")
            raise
        self._check(tensors)
        return replace(finished, tensors=tensors)

    def _check(self, tensors: Mapping[str, Any]) -> None:
        missing = [name for name in self.layout.tensors if not isinstance(tensors.get(name), torch.Tensor)]
        if missing or len(tensors) != len(self.layout.tensors):
            names = ", ".join(map(repr, self.layout.tensors))
            raise UsageError(
                f"the loader's transform must return a dict of the tensors {names}, no more and no less",
                hint="use columns=[...] for other values in the batch",
            )


def transform_generator(ref: SampleRef) -> torch.Generator:
    """The random generator that a transform gets for this sample."""
    return torch.Generator().manual_seed(int(ref.key(_TRANSFORM)[0]) >> 1)


def known_columns(fields: Mapping[str, object]) -> list[str]:
    """The names that `columns` may contain: the index's columns, "caption", and the promoted `fields` of samples."""
    from headrace.dataio.shards.index import rows

    return [*(name for name in rows.SCHEMA.names if name not in ("key", "text")), _CAPTION, *fields]


def wrapped(processor: Processor, columns: Sequence[str], transform: Transform | None) -> Processor:
    """`processor` with the requested columns and transform."""
    if transform is not None:
        processor = Transformed(processor, transform)
    return WithColumns(processor, columns) if columns else processor


class WithSource(ProcessorWrapper):
    """Adds the name of each sample's source, as "source"."""

    def __init__(self, inner: Processor, names: Sequence[str]) -> None:
        super().__init__(inner)
        self._names = tuple(names)

    @property
    def layout(self) -> SampleLayout:
        inner = self._inner.layout
        return replace(inner, numbers={**inner.numbers, "source": None})

    def _extend(self, ref: SampleRef, finished: ProcessedSample) -> ProcessedSample:
        return replace(finished, values={**finished.values, "source": self._names[ref.source]})


class PerStreamProcessor:
    """One processor for each of the plan's streams.

    The processors share the resources that `close` releases, so only the first one is closed.
    """

    def __init__(self, processors: Sequence[Processor]) -> None:
        self._processors = tuple(processors)

    @property
    def layout(self) -> SampleLayout:
        return self._processors[0].layout

    def needs(self, ref: SampleRef) -> Needs:
        return self._processors[ref.stream].needs(ref)

    def cost(self, sample: Sample) -> int:
        return max(processor.cost(sample) for processor in self._processors)

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        results = dict[int, ProcessedSample | HeadraceError]()
        for stream in sorted({one.ref.stream for one in fetched}):
            slots = [slot for slot, one in enumerate(fetched) if one.ref.stream == stream]
            results.update(zip(slots, self._processors[stream].process([fetched[slot] for slot in slots]), strict=True))
        return [results[slot] for slot in range(len(fetched))]

    def close(self) -> None:
        self._processors[0].close()


def by_stream(processors: Sequence[Processor]) -> Processor:
    """Combine processors by stream. A single processor is returned unchanged."""
    return processors[0] if len(processors) == 1 else PerStreamProcessor(processors)


def sourced(processor: Processor, names: Sequence[str]) -> Processor:
    """`processor` with the names of a mixture's sources, if there are any."""
    return WithSource(processor, names) if names else processor


MelFunction = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class WithMels(ProcessorWrapper):
    """Replaces "audio" with "mel"."""

    def __init__(self, inner: Processor, compute: MelFunction, close: Callable[[], None] = lambda: None) -> None:
        super().__init__(inner)
        self._compute, self._close = compute, close

    @property
    def layout(self) -> SampleLayout:
        inner = self._inner.layout
        return replace(inner, tensors=tuple("mel" if name == "audio" else name for name in inner.tensors))

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        results = self._inner.process(fetched)
        mels = iter(self._compute([one.tensors["audio"] for one in results if isinstance(one, ProcessedSample)]))
        return [_with_mel(one, next(mels)) if isinstance(one, ProcessedSample) else one for one in results]

    def close(self) -> None:
        self._inner.close()
        self._close()


def mels(inner: Processor, spec: AudioSpec, device: torch.device) -> Processor:
    """`inner` with the features that `spec` requests.

    On a GPU, DALI computes them if it is installed. Otherwise the decoding thread does.
    """
    from headrace.loaders.audio.mel import DaliMel, log_mel  # few loaders need these slow imports
    from headrace.loaders.audio.spec import LogMel

    if not isinstance(spec.features, LogMel):
        return inner
    settings, rate = spec.features, spec.sample_rate
    if device.type == "cuda" and gpu_count() > (device.index or 0):
        graph = DaliMel(settings, rate, device.index or 0)
        return WithMels(inner, graph, graph.close)
    return WithMels(inner, lambda sounds: [log_mel(sound, rate, settings) for sound in sounds])


def _with_mel(sample: ProcessedSample, mel: torch.Tensor) -> ProcessedSample:
    return replace(
        sample, tensors={("mel" if n == "audio" else n): mel if n == "audio" else t for n, t in sample.tensors.items()}
    )
