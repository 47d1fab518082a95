"""`Loader`: batches of fields, such as video, audio, latents, text and labels.

Purpose: check that the fields are compatible, and create the plan and the processor. `headrace.loaders.loader` does the
rest.
Invariants: those of `headrace.loaders.loader`. A sample is delivered if it has all required fields. Fields do not change
the order of the samples, except by leaving samples out and by the number of clips or windows of each sample.
Failure behaviour: the constructor raises `NotFoundError`, `AccessDeniedError` or `UsageError` before it starts
anything. Iteration raises the errors of `headrace.loaders.loader`, and those of a field's `decode` and of `transform`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from dataclasses import replace as replace_field
from typing import TYPE_CHECKING, Any

import torch
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
from headrace.loaders.fields.likes import likes_of
from headrace.loaders.fields.processor import FieldsProcessor, FieldsTransform, MediaFields, TransformedFields
from headrace.loaders.fields.registry import field_from
from headrace.loaders.fields.video import Image, Video, clip_specs, clips_of, video_bucketing
from headrace.loaders.interfaces import Collate, FieldsLayout, Processor
from headrace.loaders.loader import BaseLoader, DeliveryOptions
from headrace.loaders.processors.audio import WindowProcessor
from headrace.loaders.processors.like import LikeClips
from headrace.loaders.processors.video import ClipProcessor, ClipSpec, together
from headrace.loaders.processors.wrappers import by_stream, mels, sourced, wrapped
from headrace.loaders.sampling.buckets import Buckets, Durations
from headrace.loaders.sampling.columns import HasFiles, HasValue
from headrace.loaders.sampling.left_out import KEEPS, samples_with_all, warn_of_absent_files
from headrace.loaders.sampling.plan import Bucketing
from headrace.loaders.sampling.sample_ids import SampleIds, Small
from headrace.loaders.sampling.state import parts as described_parts
from headrace.loaders.validation import check_type

if TYPE_CHECKING:
    from headrace.loaders.audio.spec import AudioSpec
    from headrace.loaders.decode.subprocess_decoder import SubprocessDecoder
    from headrace.loaders.sampling.mixture import Mixture

AnyField = Field | Video | Audio
MAX_FIELDS = 64
_RESERVED = frozenset(["id", "key", "source", "bucket", "samples_per_rank", "empty_ranks"])


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
        collate (Mapping[str, Collate]): how entries that `transform` adds or replaces are made: "stack", "pad",
            "concat", "list" or a function (see `Collate`). Default: tensors are stacked, other values are in lists.
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

        - Each field, by its name (see `Collate`). In a batch without samples, None or an empty list.
        - Further entries of a field, such as "<name>.start" of a clip. The documentation of the field lists them.
        - "id": int64 (B,), the samples' ids. "key": a list.
        - Each of `columns`, "source", "bucket", "samples_per_rank" and "empty_ranks", as in `VideoLoader`.

    Args:
        The arguments are those of `FieldsConfig` and `LoaderConfig`; `help(Loader.__init__)` lists them.

    Raises:
        NotFoundError, AccessDeniedError, UsageError: when the loader is created.
        UsageError: while iterating, if no sample has the value that a field names, or all have one of another kind.
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
            ids = fields.find(dataset)
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

    `videos` are the `Video` fields, `audios` the `Audio` fields without `like`, and `others` those that decode files.
    `likes` says which fields follow which.
    """

    def __init__(self, config: FieldsConfig) -> None:
        self._config, self.named = config, _checked(config)
        named = self.named.items()
        self.likes = likes_of(self.named)
        self.videos = self.likes.videos
        self.audios = {name: one for name, one in named if isinstance(one, Audio) and one.like is None}
        self.others = {name: one for name, one in named if isinstance(one, Field)}
        self._check_parts()
        self.bucketing = self._bucketing()

    def _check_parts(self) -> None:
        """Check that all fields make the same number of clips or windows of each sample."""
        drivers = self.likes.drivers.values()
        media = [video.spec().clip for video in drivers] + [one.window for one in self.audios.values()]
        several = any(one.start == "every" for one in media)
        several |= any(clip.per_video > 1 for clip in media if isinstance(clip, Clip))
        several |= any(window.per_sample > 1 for window in media if isinstance(window, Window))
        if several and len(set(map(repr, media))) > 1:
            raise UsageError(
                "fields with several parts of a sample must have the same clip or window",
                hint="give all Video fields the same clip; Video and Audio with like= follow a Video field",
            )
        for name, video in self.likes.drivers.items():
            if video.file is not None and (self._config.buckets is not None or video.spec().clip.start == "every"):
                raise UsageError(
                    f"buckets and start='every' follow the sample's own video, and {name!r} has file={video.file!r}",
                    hint=f"add a Video field without file, and give {name!r} like= with its name",
                )

    def parts_of(self, dataset: Dataset, ids: SampleIds) -> int | Small:
        """The number of clips or windows of each of these samples."""
        for video in self.likes.drivers.values():
            return clips_of(dataset, ids, video.spec().clip)
        for sound in self.audios.values():
            return windows_in(dataset, ids, sound.window)
        return 1

    def _bucketing(self) -> Bucketing | None:
        buckets = self._config.buckets
        if buckets is None:
            return None
        check_type(
            "buckets", buckets, (Buckets, Durations), "Buckets(...) for videos, or Durations(...) for recordings"
        )
        if isinstance(buckets, Buckets) and len(self.likes.drivers) == 1:
            (video,) = self.likes.drivers.values()
            self._check_sizes()
            return video_bucketing(buckets, video.spec())
        if isinstance(buckets, Durations) and len(self.audios) == 1 and not self.videos:
            (sound,) = self.audios.values()
            return audio_bucketing(buckets, sound.window)
        raise UsageError(
            "buckets cannot be used with these fields",
            hint="Buckets need one Video field without like; Durations need one Audio field and no Video field",
        )

    def _check_sizes(self) -> None:
        """With buckets, the other cameras have sizes of their own."""
        for name, video in self.videos.items():
            if video.like is not None and video.size is None:
                raise UsageError(
                    f"the buckets have the sizes of {video.like!r}, and {name!r} has no size",
                    hint=f"give {name!r} a size",
                )

    @property
    def video_files(self) -> tuple[str, ...]:
        """The files of videos that samples must have."""
        return tuple(sorted({one.file for one in self.videos.values() if one.file is not None and one.required}))

    def find(self, dataset: Dataset) -> SampleIds:
        """The samples that have all required fields.

        The log says how many are left out for lack of each file, and how many images. It names optional files that no
        sample has.
        """
        own = [video for video in self.videos.values() if video.file is None]
        conditions: list[HasValue | HasFiles] = [video.condition(self._video_buckets) for video in own]
        keeps: dict[HasValue | HasFiles, str] = {}
        if self.audios:
            conditions.append(HasValue("audio_codec"))
            keeps |= self._keeps_silent()
        optional: list[HasValue | HasFiles] = []
        if any(one.uses_caption for one in self._required):
            optional.append(HasValue("text"))
        files = {ext for one in self._required for ext in one.files}
        optional += [HasFiles((ext,)) for ext in sorted(files.union(self.video_files))]
        keeps |= dict.fromkeys(optional, KEEPS)
        wanted = f"all of {', '.join(map(repr, self._deciding))}"
        ids = samples_with_all(dataset, tuple(dict.fromkeys([*conditions, *optional])), keeps, wanted)
        warn_of_absent_files(dataset, self._optional_files)
        return ids

    def _keeps_silent(self) -> dict[HasValue | HasFiles, str]:
        """What keeps samples without sound, if the loader has a `Video` field that audio can follow."""
        seconds = next(iter(self.audios.values())).window.seconds
        free = [name for name, one in self.videos.items() if one.required and name not in self.likes.tracks]
        hint = f'Audio(seconds={seconds:g}, like="{free[0]}") keeps them, silent' if free else ""
        return {HasValue("audio_codec"): hint} if free else {}

    @property
    def _deciding(self) -> list[str]:
        """The names of the fields that leave samples out."""
        fields = {name: one for name, one in self.others.items() if one.required and (one.files or one.uses_caption)}
        videos = {name: one for name, one in self.videos.items() if one.required}
        return [name for name in self.named if name in fields or name in videos or name in self.audios]

    @property
    def _optional_files(self) -> set[str]:
        """The files of fields with `required=False`."""
        files = {ext for one in self.others.values() if not one.required for ext in one.files}
        return files | {one.file for one in self.videos.values() if one.file is not None and not one.required}

    @property
    def described(self) -> Any:
        """Describes the parts and the choice of samples in the loader's state.

        With one `Video` or `Audio` field and no other required field, it is that of `VideoLoader` or `AudioLoader`.
        """
        drivers = self.likes.drivers.values()
        media = [video.spec().clip for video in drivers] + [one.window for one in self.audios.values()]
        files = sorted({ext for one in self._required for ext in one.files})
        if any(one.uses_caption for one in self._required):
            files.append("text")
        files += [f"video {ext}" for ext in self.video_files]
        files += [f"clips of {one.file}" for one in drivers if one.file is not None]
        return media[0] if len(media) == 1 and not files else [*map(described_parts, media), *files]

    @property
    def _required(self) -> list[Field]:
        return [one for one in self.others.values() if one.required]

    def processor(self, output: Output, delivery: DeliveryOptions, streams: Sequence[int]) -> Processor:
        """The processor of all fields. `streams` has the bucket of each stream."""
        has_media = bool(self.videos or self.audios)
        in_subprocess = self._config.subprocess_decoder(delivery.num_threads) if has_media else None
        names = sorted(self.videos, key=lambda name: self.videos[name].like is not None)  # drivers first
        media = [self._video_part(name, in_subprocess, output, streams) for name in names]
        media += [self._audio_part(name, in_subprocess, output, streams) for name in self.audios]
        aligned = {name: self._specs(like, streams) for name, like in self.likes.masks.items()}
        return FieldsProcessor(media, self.others, self._entries, self._layout(output), aligned)

    @property
    def _planes(self) -> dict[str, Video]:
        """The fields of raw planes."""
        return {name: one for name, one in self.videos.items() if one.pixel_format != "rgb"}

    @property
    def _entries(self) -> list[str]:
        """The entries of the fields. The colour information of planes and other further entries follow them."""
        entries = list[str]()
        for name in self.named:
            entries += [name, f"{name}.color"] if name in self._planes else [name]
            entries += [f"{name}.{entry}" for entry in (self.others[name].entries if name in self.others else ())]
        return entries

    def _video_part(
        self, name: str, in_subprocess: SubprocessDecoder | None, output: Output, streams: Sequence[int]
    ) -> MediaFields:
        """The field `name` and the audio of its clips."""
        video, device, names = self.videos[name], output.device, {"video": name, "clip": f"{name}.start"}
        names["color"] = f"{name}.color"  # of planes
        audio = None
        if name in self.likes.tracks:
            track_name, track = self.likes.tracks[name]
            audio = track.spec()
            names |= {"audio": track_name, "mel": track_name, "audio_samples": f"{track_name}.samples"}
        decoder = in_subprocess or registry.open_decoder(video.decoder_option, device.type, device.index or 0)
        decode_audio = in_subprocess.decode_audio if in_subprocess else None
        delivered = [one.file for one in self.videos.values() if one.file is not None]
        each = [ClipProcessor(spec, decoder, decode_audio, delivered) for spec in self._specs(name, streams, audio)]
        if video.like is not None:
            fronts = self._specs(video.like, streams)
            clips = by_stream([LikeClips(one, video.like, front) for one, front in zip(each, fronts, strict=True)])
        else:
            clips = by_stream(each)
        processor = clips if audio is None else mels(clips, audio, device)
        absent: dict[str, Any] | None = None
        if not video.required:
            absent = {name: None} | (
                {names["color"]: torch.zeros(2, dtype=torch.int64)} if name in self._planes else {}
            )
        return MediaFields(
            processor, names, draws=name == next(iter(self.videos)), video=name, file=video.file, absent=absent
        )

    def _specs(self, name: str, streams: Sequence[int], audio: AudioSpec | None = None) -> list[ClipSpec]:
        """The format of the clips of a `Video` field in each stream. A field with `like` keeps its own size."""
        spec, driver = self.likes.spec(name, audio), self.likes.driver_of(name)
        if driver == name:
            return clip_specs(spec, self._video_buckets, streams)
        return [replace(spec, clip=front.clip) for front in self._specs(driver, streams)]

    def _audio_part(
        self, name: str, in_subprocess: SubprocessDecoder | None, output: Output, streams: Sequence[int]
    ) -> MediaFields:
        sound, spec = self.audios[name], self.audios[name].spec()
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
        dtypes = {"yuv420p10": torch.uint16}
        planes = {name: dtypes.get(one.pixel_format, torch.uint8) for name, one in self._planes.items()}
        images = frozenset(name for name, one in self.videos.items() if isinstance(one, Image))
        return FieldsLayout(
            collate={name: one.collate if isinstance(one, Field) else "stack" for name, one in self.named.items()}
            | dict(self._config.collate),
            optional=frozenset(name for name, one in (self.others | dict(self.videos)).items() if not one.required),
            pixels={name: one for name, one in pixels.items() if name not in planes},
            images=images,
            planes=planes,
            drawn=next(iter(self.videos), None),
            in_place=self._in_place() if output.device.type == "cpu" else frozenset(),
        )

    def _in_place(self) -> frozenset[str]:
        """The entries of arrays that may be read directly into the batch."""
        if self.videos or self.audios or self._config.transform is not None:
            return frozenset()
        uses = Counter(ext for one in self.others.values() for ext in one.files)
        return frozenset(
            name
            for name, one in self.others.items()
            if one.in_place and one.collate == "stack" and len(one.files) == 1 and uses[one.files[0]] == 1
        )

    def grouped(self, delivery: DeliveryOptions, streams: Sequence[int]) -> DeliveryOptions:
        """`delivery` with the groups of samples that one thread builds together."""
        config = self._config
        if not self.videos and not self.audios:
            threads = -(-delivery.num_threads // (1 + delivery.prefetch_batches))  # for each batch in preparation
            return replace(delivery, group=-(-(config.batch_size or 1) // threads))
        if len(self.videos) != 1:
            return delivery
        (video,) = self.videos.values()
        decoder = registry.FALLBACK if config.decode_in_subprocess is not False else video.decoder_option
        if not registry.candidates(decoder, delivery.output.device.type)[0].shares_decoding:
            return delivery
        specs = clip_specs(video.spec(), self._video_buckets, streams)
        more_work = config.transform is not None or len(self.named) > 1
        return replace(delivery, group_slots=together(specs, transformed=more_work))


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
            raise UsageError(
                f"a field cannot be called {name!r}",
                hint="give a Python identifier other than those of Headrace's entries",
            )
        if name in config.columns:
            raise UsageError(f"{name!r} is both a field and one of columns", hint="rename the field")
        if not isinstance(one, Field | Video | Audio):
            raise UsageError(
                f"the field {name!r} cannot be {one!r:.200}",
                hint="give Video(...), Audio(...), Npy(...) or another Field",
            )
        checked[name] = one
    return checked
