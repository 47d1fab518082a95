"""`Loader`: batches of fields, such as video, audio, latents, text and labels.

Purpose: check that the fields go together, and create the plan and the processor. `headrace.loaders.loader` does the
rest.
Invariants: those of `headrace.loaders.loader`. A sample is delivered if it has all required fields. Fields do not change
the order of the samples, except by leaving samples out and by the number of clips or windows of each sample.
Failure behaviour: the constructor raises `NotFoundError`, `AccessDeniedError` or `UsageError` before it starts
anything. Iteration raises the errors of `headrace.loaders.loader`, and those of a field's `decode` and of `transform`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from dataclasses import replace as replace_field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.audio.spec import Window
from headrace.loaders.batch.batch import Output
from headrace.loaders.clip import Clip
from headrace.loaders.config import LoaderConfig, configured_by
from headrace.loaders.decode import registry
from headrace.loaders.decode.base import GPU_BATCH
from headrace.loaders.fields.audio import Audio, audio_bucketing, windows_in, windows_of
from headrace.loaders.fields.base import Field
from headrace.loaders.fields.pictures import Mask
from headrace.loaders.fields.processor import FieldsProcessor, FieldsTransform, MediaFields, TransformedFields
from headrace.loaders.fields.registry import field_from
from headrace.loaders.fields.video import Image, Video, clip_specs, clips_of, video_bucketing
from headrace.loaders.interfaces import Collate, FieldsLayout, Processor
from headrace.loaders.loader import BaseLoader, DeliveryOptions
from headrace.loaders.processors.audio import WindowProcessor
from headrace.loaders.processors.video import ClipProcessor, together
from headrace.loaders.processors.wrappers import by_stream, mels, sourced, wrapped
from headrace.loaders.sampling.buckets import Buckets, Durations
from headrace.loaders.sampling.columns import AllOf, HasFiles, HasValue, samples_where
from headrace.loaders.sampling.plan import Bucketing
from headrace.loaders.sampling.sample_ids import SampleIds, Small
from headrace.loaders.sampling.state import parts as described_parts

if TYPE_CHECKING:
    from headrace.loaders.decode.subprocess_decoder import SubprocessDecoder
    from headrace.loaders.sampling.mixture import Mixture

AnyField = Field | Video | Audio
MAX_FIELDS = 64
_RESERVED = frozenset(["id", "key", "source", "bucket", "sizes", "dry"])


@dataclass(frozen=True)
class FieldsConfig(LoaderConfig):
    """The options that `Loader` adds to those of `LoaderConfig`.

    Args:
        url_or_dataset (str | os.PathLike | Dataset | Mixture): URL or directory of a dataset, an open dataset, or a
            mixture.
        batch_size (int | None): samples in a rank's batch. Omit it with `buckets`.
        fields (Mapping[str, Field | Video | Audio | Mapping]): the entries of a batch, by name. A mapping describes a
            field, as in a configuration file: `{"field": "npy", "file": "latent.npy"}`.
        buckets (Buckets | Durations | None): make each batch of samples of one shape, within a budget. `Buckets` choose
            by the video, and its field has no size. `Durations` choose by the audio. Default: None.
        transform (Callable): called as `transform(values, generator)` for each sample, with a dict of the values of the
            fields. It returns a dict, and may add, drop and rename values. Each sample has its own generator, which a
            resumed run seeds identically. Default: None.
        collate (Mapping[str, Collate]): how entries that `transform` adds are made: "stack", "pad", "concat", "list" or
            a function (see `Collate`). Default: tensors are stacked, other values are in lists.
    """

    url_or_dataset: str | os.PathLike[str] | Dataset | Mixture
    batch_size: int | None = None
    _: KW_ONLY
    fields: Mapping[str, AnyField] = field()
    buckets: Buckets | Durations | None = None
    transform: FieldsTransform | None = None
    collate: Mapping[str, Collate] = field(default_factory=dict)


class Loader(BaseLoader):
    """Batches of fields from a dataset: any combination of video, audio and other files of the samples.

    Yields:
        A dict:

        - Each field, by its name (see `Collate`). None in a batch without samples.
        - Further entries of a field, such as "<name>.start" of a clip. The documentation of the field lists them.
        - "id": int64 (B,), the samples' ids. "key": a list.
        - Each of `columns`, "source", "bucket", "sizes" and "dry", as in `VideoLoader`.

    Args:
        The arguments are those of `FieldsConfig` and `LoaderConfig`; `help(Loader.__init__)` lists them.

    Raises:
        NotFoundError, AccessDeniedError, UsageError: when the loader is created.
        CorruptionError: while iterating, if too many samples are damaged, or a sample and all its substitutes.
        HeadraceError: while iterating, for errors of the store.

    Example:
        >>> fields = {"video": Video(Clip(frames=4), size=(32, 32)), "file": Bytes("mp4")}
        >>> loader = Loader(clips, batch_size=2, fields=fields)
        >>> batch = next(iter(loader))
        >>> batch["video"].shape, len(batch["file"])
        (torch.Size([2, 4, 3, 32, 32]), 2)
        >>> loader.close()
    """

    @configured_by(FieldsConfig)
    def __init__(self, config: FieldsConfig) -> None:
        fields = _Fields(config)
        output = config.output()
        delivery = config.delivery(output, group=GPU_BATCH if fields.videos else 1)

        def find(dataset: Dataset) -> tuple[SampleIds, int | Small]:
            ids = samples_where(dataset, fields.condition)
            if not len(ids):
                raise UsageError(
                    f"{dataset.url} has no sample with all of {', '.join(map(repr, fields.named))}",
                    hint="`headrace info` lists its contents; fields with required=False leave no sample out",
                )
            return ids, fields.parts_of(dataset, ids)

        def start_processor() -> Processor:
            processor = fields.processor(output, delivery, plan.buckets)
            if config.transform is not None:
                processor = TransformedFields(processor, config.transform)
            return sourced(wrapped(processor, config.columns, None), plan.names)

        plan, owned = config.open_plan(
            config.url_or_dataset, find, fields.described, config.sampling(config.batch_size), fields.bucketing
        )
        delivery = fields.grouped(delivery, plan.buckets)
        super().__init__(plan, start_processor, delivery=delivery, bad_samples=config.bad_samples, owned=owned)


class _Fields:
    """The checked fields of a loader, and what the loader makes of them.

    `videos` are the fields of pixels, `sounds` those of audio with its own windows, and `others` those that decode
    files. `tracks` are the fields of audio of a clip, by the name of the field of its pixels.
    """

    def __init__(self, config: FieldsConfig) -> None:
        self._config, self.named = config, _checked(config)
        named = self.named.items()
        self.videos = {name: one for name, one in named if isinstance(one, Video)}
        self.sounds = {name: one for name, one in named if isinstance(one, Audio) and one.like is None}
        self.others = {name: one for name, one in named if isinstance(one, Field)}
        self.tracks: dict[str, tuple[str, Audio]] = {}
        self._likes: dict[str, str] = {}
        """For each mask with `like`, the name of that field."""
        for name, one in named:
            if not isinstance(one, Audio | Mask) or one.like is None:
                continue
            if one.like not in self.videos:
                there = ", ".join(map(repr, self.videos)) or "none"
                raise UsageError(
                    f"the field {name!r} is like {one.like!r}, which is not a Video or Image field",
                    hint=f"the fields of this kind are: {there}",
                )
            if isinstance(one, Mask):
                self._likes[name] = one.like
            else:
                self._add_track(name, one, one.like)
        self._check_parts()
        self.bucketing = self._bucketing()

    def _add_track(self, name: str, track: Audio, like: str) -> None:
        if like in self.tracks:
            raise UsageError(
                f"the fields {self.tracks[like][0]!r} and {name!r} are both like {like!r}", hint="leave one out"
            )
        self.videos[like].spec(track.spec())  # checks that they go together
        self.tracks[like] = name, track

    def _check_parts(self) -> None:
        """Check that all fields have as many clips or windows of each sample."""
        media = [video.spec().clip for video in self.videos.values()] + [one.window for one in self.sounds.values()]
        several = any(one.start == "every" for one in media)
        several |= any(clip.per_video > 1 for clip in media if isinstance(clip, Clip))
        several |= any(window.per_sample > 1 for window in media if isinstance(window, Window))
        if several and len(set(map(repr, media))) > 1:
            raise UsageError(
                "a field makes several parts of a sample, and another field makes other parts",
                hint="give all fields of video the same clip; audio with like= follows a field of video",
            )

    def parts_of(self, dataset: Dataset, ids: SampleIds) -> int | Small:
        """The number of clips or windows of each of these samples."""
        for video in self.videos.values():
            return clips_of(dataset, ids, video.spec().clip)
        for sound in self.sounds.values():
            return windows_in(dataset, ids, sound.window)
        return 1

    def _bucketing(self) -> Bucketing | None:
        buckets = self._config.buckets
        if buckets is None:
            return None
        if isinstance(buckets, Buckets) and len(self.videos) == 1:
            (video,) = self.videos.values()
            return video_bucketing(buckets, video.spec())
        if isinstance(buckets, Durations) and len(self.sounds) == 1 and not self.videos:
            (sound,) = self.sounds.values()
            return audio_bucketing(buckets, sound.window)
        raise UsageError(
            "buckets do not go with these fields",
            hint="Buckets go with one Video field, Durations with one Audio field",
        )

    @property
    def condition(self) -> AllOf:
        """The samples that have all required fields."""
        conditions: list[HasValue | HasFiles] = [video.condition(self._video_buckets) for video in self.videos.values()]
        if self.sounds:
            conditions.append(HasValue("audio_codec"))
        if any(one.uses_caption for one in self._required):
            conditions.append(HasValue("text"))
        if files := sorted({ext for one in self._required for ext in one.files}):
            conditions.append(HasFiles(tuple(files)))
        return AllOf(tuple(dict.fromkeys(conditions)))

    @property
    def described(self) -> Any:
        """Describes the parts and the choice of samples in the loader's state.

        With one field of pixels or sound and no required others, it is that of `VideoLoader` or `AudioLoader`.
        """
        media = [video.spec().clip for video in self.videos.values()] + [one.window for one in self.sounds.values()]
        files = sorted({ext for one in self._required for ext in one.files})
        if any(one.uses_caption for one in self._required):
            files.append("text")
        return media[0] if len(media) == 1 and not files else [*map(described_parts, media), *files]

    @property
    def _required(self) -> list[Field]:
        return [one for one in self.others.values() if one.required]

    def processor(self, output: Output, delivery: DeliveryOptions, streams: Sequence[int]) -> Processor:
        """The processor of all fields. `streams` has the bucket of each stream."""
        has_media = bool(self.videos or self.sounds)
        in_subprocess = self._config.subprocess_decoder(delivery.num_threads) if has_media else None
        media = [self._video_part(name, in_subprocess, output, streams) for name in self.videos]
        media += [self._sound_part(name, in_subprocess, output, streams) for name in self.sounds]
        aligned = {
            name: clip_specs(self.videos[like].spec(), self._video_buckets, streams)
            for name, like in self._likes.items()
        }
        return FieldsProcessor(media, self.others, tuple(self.named), self._layout(output), aligned)

    def _video_part(
        self, name: str, in_subprocess: SubprocessDecoder | None, output: Output, streams: Sequence[int]
    ) -> MediaFields:
        """The field `name` and the audio of its clips."""
        video, device, names = self.videos[name], output.device, {"video": name, "clip": f"{name}.start"}
        audio = None
        if name in self.tracks:
            track_name, track = self.tracks[name]
            audio = track.spec()
            names |= {"audio": track_name, "mel": track_name, "audio_samples": f"{track_name}.samples"}
        decoder = in_subprocess or registry.open_decoder(video.decoder, device.type, device.index or 0)
        decode_audio = in_subprocess.decode_audio if in_subprocess else None
        specs = clip_specs(video.spec(audio), self._video_buckets, streams)
        clips = by_stream([ClipProcessor(spec, decoder, decode_audio) for spec in specs])
        processor = clips if audio is None else mels(clips, audio, device)
        return MediaFields(processor, names, draws=name == next(iter(self.videos)))

    def _sound_part(
        self, name: str, in_subprocess: SubprocessDecoder | None, output: Output, streams: Sequence[int]
    ) -> MediaFields:
        sound, spec = self.sounds[name], self.sounds[name].spec()
        buckets = self._config.buckets if isinstance(self._config.buckets, Durations) else None
        windows = windows_of(sound.window, buckets, streams)
        each = [WindowProcessor(one, replace_field(spec, seconds=one.seconds), in_subprocess) for one in windows]
        names = {"audio": name, "mel": name, "start": f"{name}.start", "audio_samples": f"{name}.samples"}
        return MediaFields(mels(by_stream(each), spec, output.device), names)

    @property
    def _video_buckets(self) -> Buckets | None:
        return self._config.buckets if isinstance(self._config.buckets, Buckets) else None

    def _layout(self, output: Output) -> FieldsLayout:
        pixels = {name: self._config.output(one.normalize, one.dtype, one.layout) for name, one in self.videos.items()}
        images = frozenset(name for name, one in self.videos.items() if isinstance(one, Image))
        return FieldsLayout(
            collate={name: one.collate if isinstance(one, Field) else "stack" for name, one in self.named.items()}
            | dict(self._config.collate),
            optional=frozenset(name for name, one in self.others.items() if not one.required),
            pixels=pixels,
            images=images,
            drawn=next(iter(self.videos), None),
        )

    def grouped(self, delivery: DeliveryOptions, streams: Sequence[int]) -> DeliveryOptions:
        """`delivery` with the groups of samples that one thread builds together."""
        config = self._config
        if not self.videos and not self.sounds:
            threads = -(-delivery.num_threads // (1 + delivery.prefetch_batches))  # for each batch in preparation
            return replace(delivery, group=-(-(config.batch_size or 1) // threads))
        if len(self.videos) != 1:
            return delivery
        (video,) = self.videos.values()
        decoder = registry.FALLBACK if config.decode_in_subprocess is not False else video.decoder
        if not registry.candidates(decoder, delivery.output.device.type)[0].shares_decoding:
            return delivery
        specs = clip_specs(video.spec(), self._video_buckets, streams)
        alone = config.transform is not None or len(self.named) > 1
        return replace(delivery, group_slots=together(specs, transformed=alone))


def _checked(config: FieldsConfig) -> dict[str, AnyField]:
    """The fields, with checked names and types."""
    fields: object = config.fields
    if not isinstance(fields, Mapping) or not 1 <= len(fields) <= MAX_FIELDS:
        raise UsageError(
            f"fields={fields!r:.200} is not a dict of fields",
            hint='such as fields={"video": Video(size=(256, 256)), "latent": Npy("latent.npy")}',
        )
    checked = dict[str, AnyField]()
    for name, described in fields.items():
        one = field_from(described) if isinstance(described, Mapping) else described
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
            raise UsageError(f"a field cannot be called {name!r}", hint="give a Python identifier that no entry has")
        if name in config.columns:
            raise UsageError(f"{name!r} is both a field and one of columns", hint="rename the field")
        if not isinstance(one, Field | Video | Audio):
            raise UsageError(
                f"the field {name!r} cannot be {one!r:.200}",
                hint="give Video(...), Audio(...), Npy(...) or another Field",
            )
        checked[name] = one
    return checked
