"""The fields that follow another field of a loader: cameras, audio, masks and rows with `like`.

Purpose: check that each `like` names a `Video` field that has what is asked of it, before a loader starts.
Invariants: a `Video` field without `like` drives the choice of its clips. All others take the instants of one of these.
So chains of `like` have at most two links: rows or audio of a camera, and the camera of the driving field.
Failure behaviour: `UsageError` names the fields and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Any

from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import did_you_mean
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.fields.audio import Audio
from headrace.loaders.fields.pictures import Mask
from headrace.loaders.fields.rows import Rows
from headrace.loaders.fields.video import Video
from headrace.loaders.processors.video import ClipSpec


@dataclass(frozen=True)
class Likes:
    """The `Video` fields of a loader, and the fields that follow them.

    Args:
        videos: the `Video` fields, by name.
        drivers: those without `like`.
        tracks: for a `Video` field, the name of the `Audio` field that is like it, and that field.
        masks: for each mask with `like`, the name of its `Video` field.
    """

    videos: Mapping[str, Video]
    drivers: Mapping[str, Video]
    tracks: dict[str, tuple[str, Audio]] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)

    def driver_of(self, name: str) -> str:
        """The field whose instants the `Video` field `name` shows."""
        return self.videos[name].like or name

    def spec(self, name: str, audio: AudioSpec | None = None) -> ClipSpec:
        """The format of the clips of a `Video` field, with the clip of the field that drives it."""
        video = self.videos[name]
        if video.like is None:
            return video.spec(audio)
        clip = self.videos[video.like].spec().clip
        return replace(replace_field(video, clip=clip, like=None).spec(audio), file=video.file)


def likes_of(named: Mapping[str, Any]) -> Likes:
    """Check the fields with `like`, and return what follows what."""
    videos = {name: one for name, one in named.items() if isinstance(one, Video)}
    likes = Likes(videos, {name: one for name, one in videos.items() if one.like is None})
    for name, one in named.items():
        like = getattr(one, "like", None)
        if like is None or not isinstance(one, Video | Audio | Mask | Rows):
            continue
        _check_like(name, like, likes)
        if isinstance(one, Mask):
            _add_mask(name, like, likes)
        elif isinstance(one, Audio):
            _add_track(name, one, like, likes)
    return likes


def _check_like(name: str, like: Any, likes: Likes) -> None:
    videos = likes.videos
    if like not in videos:
        allowed = [one for one, video in videos.items() if _may_follow(name, one, video, likes)]
        hint = f"it may be like: {', '.join(map(repr, allowed))}" if allowed else "add such a field, or leave like out"
        raise UsageError(
            f"the field {name!r} is like {like!r:.80}, which is not a Video or Image field"
            f"{did_you_mean(str(like), allowed)}",
            hint=hint,
        )
    if name in videos and (driver := videos[like].like) is not None:
        raise UsageError(
            f"the field {name!r} is like {like!r}, which is itself like {driver!r}", hint=f"give like={driver!r}"
        )
    if not videos[like].required:
        raise UsageError(
            f"the field {name!r} is like {like!r}, which some samples may lack",
            hint=f"leave required=False out of {like!r}, or let {name!r} be like a field that all samples have",
        )


def _may_follow(name: str, other: str, video: Video, likes: Likes) -> bool:
    """Whether the field `name` may be like the `Video` field `other`."""
    return video.required and other != name and (video.like is None or name not in likes.videos)


def _add_mask(name: str, like: str, likes: Likes) -> None:
    if likes.videos[like].pixel_format != "rgb":
        raise UsageError(
            f"the mask {name!r} cannot be aligned with raw planes, whose crop begins at even pixels",
            hint=f'give {like!r} pixel_format="rgb"',
        )
    likes.masks[name] = like


def _add_track(name: str, track: Audio, like: str, likes: Likes) -> None:
    if like in likes.tracks:
        raise UsageError(
            f"the fields {likes.tracks[like][0]!r} and {name!r} are both like {like!r}", hint="leave one out"
        )
    clip = likes.spec(like).clip
    if track.seconds is None and clip.fps is None:
        raise UsageError(
            f"the audio {name!r} is as long as the clip of {like!r}, whose length without fps differs between videos",
            hint=f"the clip needs fps, such as Clip({clip.frames}, fps=8), or give Audio(seconds=...)",
        )
    likes.spec(like, track.spec())  # checks that they are compatible
    likes.tracks[like] = name, track
