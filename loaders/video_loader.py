"""`VideoLoader`: batches of video clips, with the sound of the same window where it is wanted.

Purpose: check what is asked for and put plan and work together; `headrace.loaders.loader` does the rest.
Invariants: those of the engine.
Failure behaviour: `NotFoundError`, `AccessDeniedError`, `UsageError` before anything is started; while iterating, the
engine's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from msgspec.structs import replace

from headrace.dataio.shards.contract import Sample
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.loaders import arguments, shapes
from headrace.loaders.clip import Clip, counts
from headrace.loaders.common import Asked, Common, explicit
from headrace.loaders.decode.choose import AutoDecoder, Backend, explain
from headrace.loaders.decode.contract import Color
from headrace.loaders.decode.dali import GPU_BATCH
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import Loader
from headrace.loaders.partial import needed
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import column, samples_with
from headrace.loaders.validation import plain
from headrace.loaders.works.clips import ClipWork, Look, together
from headrace.loaders.works.cut import Cut
from headrace.loaders.works.sources import by_stream

if TYPE_CHECKING:  # what few loaders need is imported where they need it
    from headrace.loaders.sampling.buckets import Buckets
    from headrace.loaders.sampling.mixture import Mixture
    from headrace.loaders.sound.spec import AudioSpec


@explicit
class VideoLoader(Loader):
    """Batches of video clips from a dataset; pictures are clips of one frame, and come where `clip.frames` is 1.

    *What.* `url_or_dataset`: a dataset's URL (its newest `version`, or that number or tag), an open `Dataset`, or a
    `Mixture` of them. `trust_mounts` lets it name folders of this machine, private hosts and other S3 endpoints for its
    shards. `batch_size` is per rank. `clip` says which frames. `audio=AudioSpec(...)` adds sound, `True` is
    `AudioSpec()`. `columns` of the index, or promoted fields of the samples' JSON, are listed in each batch.

    *Pixels.* `size` is (height, width): clips are scaled to cover it (`antialias`) and cropped around the centre, or
    with `crop="random"` somewhere; None keeps the source's size, which all clips of a batch must then share. `flip` is
    how likely a clip is mirrored. `rotate` turns frames as their metadata says. `color`: "bt601" (every decoder alike,
    to the bit on CPUs), "tagged" (as the file says) or "fast" (as the file says, scaled in the same pass). `dtype` is
    "uint8", "float16", "bfloat16" or "float32"; floats are pixels in 0 … 1, from which `normalize=(mean, std)`, three
    numbers each, takes the mean and divides by the deviation. `layout` orders a clip's axes: "TCHW", "CTHW" or "THWC".
    `decoder`: "auto" (NVDEC by DALI on a GPU, else PyAV), "dali" (DALI also on the CPU, for what it decodes there) or
    "pyav". `transform(tensors, generator)` is called for every sample, before pixels become floats, with a generator of
    its own that a resumed run seeds alike; what it returns, a dict of the same names, is batched.

    *Order.* `rank` and `world_size` default to torch.distributed's. `buckets` take the place of `batch_size` and
    `size`: each batch is of one shape, within a budget. `evaluate` delivers every sample once, in order, without
    padding. Damaged samples are replaced by neighbours (`on_bad="replace"`) or left out of their batch ("shorter"; what
    an evaluation does if nothing is said); after `quarantine_limit` of them, a number or a share of the samples below
    1, it gives up.

    *Delivery.* `device`: "cpu" (pinned where CUDA is), "pinned" (or an error), "cuda", or a torch.device. `threads`
    decode (default: this rank's share of the machine's cores, at most 16), `prefetch` batches ahead, `memory` bytes at
    most in flight. A batch keeps its memory as long as anything refers to it; after that it is used again, unless
    `copy`. `sidecar`: "auto", a socket's path, or None. `isolate` decodes (by PyAV) in processes of their own, which
    may crash, or hang for so many seconds (`True`: 60).

    Iterating yields the rest of the current epoch; iterating again, the next one (of an evaluation always all, unless a
    state was loaded). A batch is a dict: "video" (B, T, 3, H, W), contiguous, on `device`; "id" int64 (B,) numbers of
    the samples; "key" and "text" lists; "clip" float64 (B,), seconds at which each clip begins; with audio, "audio"
    float32 (B, C, S) or "mel" float32 (B, C, bands, frames), and "audio_samples" int64 (B,), how many of S are real
    sound and not zeros after it; and the columns. A mixture adds "source", the names of the samples' sources; buckets
    add "bucket", the number of the batch's; an evaluation adds "sizes", how many samples each rank was given, those
    that turned out damaged too, and "dry", the ranks that were given none.

    With `drop_last=False` the tail of an epoch is shared out as evenly as it goes: a rank may get one clip fewer than
    another, or a batch of none ("video" is then None), so that all ranks see equally many batches.

    Raises `NotFoundError`, `AccessDeniedError`, `UsageError` here; while iterating, the errors of
    `headrace.loaders.batch.sample_builder`.
    """

    def __init__(
        self,
        url_or_dataset: str | os.PathLike[str] | Dataset | Mixture,
        batch_size: int | None = None,
        *,
        clip: Clip | None = None,
        size: tuple[int, int] | None = None,
        audio: bool | AudioSpec = False,
        buckets: Buckets | None = None,
        crop: Literal["center", "random"] = "center",
        flip: float = 0.0,
        antialias: bool = True,
        rotate: bool = False,
        color: Color = "bt601",
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        dtype: str | torch.dtype | None = None,
        layout: str = "TCHW",
        decoder: Backend = "auto",
        **common: Unpack[Common],
    ) -> None:
        asked = Asked.of(self, common)
        arguments.of_kind("clip", clip, Clip, "clip=Clip(frames=16)")
        if buckets is not None:
            from headrace.loaders.sampling.buckets import Buckets

            arguments.of_kind("buckets", buckets, Buckets, "Buckets((Bucket((height, width)), ...), budget=...)")
        clip, sound = clip or Clip(), _sound(audio)
        arguments.one_of("color", color, ("bt601", "tagged", "fast"))
        arguments.one_of("decoder", decoder, ("auto", "dali", "pyav"))
        antialias, rotate = plain("antialias", antialias, bool), plain("rotate", rotate, bool)
        look = Look(clip, arguments.checked_size(size), rotate, sound, Cut(crop, flip), antialias, color)
        if sound is not None:
            sound.samples(clip)
        output = arguments.output(asked.device, normalize, dtype, layout)
        delivery = asked.delivery(output, group=GPU_BATCH)
        self._look, self._decoder = look, decoder

        def find(dataset: Dataset) -> tuple[I64, Any]:
            left_out = IMAGE_EXTENSIONS if clip.frames > 1 else ()
            ids = samples_with(dataset, "video_ext", "video", without=left_out)
            parts: Any = clip.per_video
            if clip.start == "every":
                parts = counts(clip, column(dataset, "frames", ids), column(dataset, "duration", ids))
            return ids, parts

        def work() -> Processor:
            apart = asked.isolated(delivery)
            decodes = apart or AutoDecoder(output.device.type, output.device.index or 0, decoder)
            hear = apart.hear if apart else None
            alone = apart is None and output.device.type == "cpu" and decoder != "dali"
            looks = shapes.looks(look, buckets, made.buckets)
            works = [ClipWork(one, decodes, hear, one_by_one=alone) for one in looks]
            return asked.finished(by_stream(works), sound, output.device, made.names)

        how, sorting = asked.sampling(batch_size), shapes.sorting(buckets, look)
        made, owned = asked.planned(url_or_dataset, find, clip, how, sorting)
        if decoder != "dali" and not asked.isolate:  # others decode every clip by itself
            how_looked = shapes.looks(look, buckets, made.buckets)
            delivery = replace(delivery, grouped=together(how_looked, transformed=asked.transform is not None))
        super().__init__(made, work, delivery, asked.refusing, owned)

    def explain(self, sample: int | Sample = 0) -> str:
        """What happens to a sample, and by which rules: its stream, its decoder, its colours, its size, what is read of
        it."""
        arguments.of_kind("sample", sample, (int, Sample), "its number, or a Sample")
        one = self.dataset.sample(sample) if isinstance(sample, int) else sample
        told = explain(one, self._look.color, self._delivery.output.device.type, self._decoder)
        if one.video is None:
            return told
        inside = self._look.audio is not None and one.audio is not None and one.audio.ext == one.video.ext
        return f"{told}\n{needed.explain(one, self._look.clip, sound=inside)}"


def _sound(audio: bool | AudioSpec) -> AudioSpec | None:
    """The sound that is wanted, if any."""
    if audio is False or audio is None:
        return None
    from headrace.loaders.sound.spec import AudioSpec

    arguments.of_kind("audio", audio, (bool, AudioSpec), "True, or AudioSpec(...)")
    return AudioSpec() if audio is True else audio
