"""Applies a recipe to the files of one sample: re-encode, copy into another container, cut into clips.

Invariants: only files with pictures are changed. Files with only audio, and all other files, stay as they are. A sample
that is split becomes the clips `-0000`, `-0001` and so on. Each clip has all other members, and its subtitles are cut
to match. The JSON of a clip says what it shows: `clip_of` is the key of the whole sample, and `clip_start` and
`clip_end` are seconds in its time.
Failure behaviour: errors of `encode` and `remux` pass through. A sample that cannot be split raises `UnsupportedError`.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media import probe, vtt
from headrace.dataio.shards.media.container import CONVERTED_EXTENSIONS, MEDIA_EXTENSIONS, VIDEO_EXTENSIONS
from headrace.dataio.shards.media.encode import FORMATS, encode
from headrace.dataio.shards.media.facts import Recipe, Request, Task
from headrace.dataio.shards.media.remux import Piece, remux
from headrace.dataio.shards.media.sample_json import Sample, with_fields

_PICTURES = VIDEO_EXTENSIONS | CONVERTED_EXTENSIONS


def convert(files: Request, task: Task) -> list[Sample]:
    """Apply the task's recipe to `files` and return the samples. New files go into the task's scratch folder."""
    recipe = task.recipe
    media = [(ext, path) for ext, path in files if ext in MEDIA_EXTENSIONS]
    media = media or [(ext, path) for ext, path in files if ext in CONVERTED_EXTENSIONS]
    pictures = [(ext, path) for ext, path in media if ext in _PICTURES and _has_pictures(path)]
    if not pictures:
        return [Sample("", files)]
    if recipe.split is not None and len(media) > 1:
        names = ", ".join(ext for ext, _ in media)
        raise UnsupportedError(f"a sample with several media files ({names}) cannot be split")
    rest = [item for item in files if item not in pictures]
    made = [_one(ext, path, recipe, os.path.join(task.scratch, str(n))) for n, (ext, path) in enumerate(pictures)]
    if recipe.split is None:
        changed = [(ext, pieces[0].path) for ext, pieces in made]
        if len({ext for ext, _ in changed + rest}) < len(files):
            raise UnsupportedError("two of its files would become the same member")
        return [Sample("", sorted(changed + rest))]
    (ext, pieces), subtitles = made[0], dict(rest).get("vtt")
    cues = None if subtitles is None else vtt.read(subtitles)
    return [_clip(task, n, ext, piece, rest, cues) for n, piece in enumerate(pieces)]


def _has_pictures(path: str) -> bool:
    with open(path, "rb") as file:
        probe._check_file(file, os.fstat(file.fileno()).st_size)
    with probe._open(f"file:{path}") as container:
        return probe._pick_video(container) is not None


def _one(ext: str, path: str, recipe: Recipe, stem: str) -> tuple[str, list[Piece]]:
    target = recipe.container or ("mp4" if recipe.codec else ext)
    if target not in FORMATS:
        raise UnsupportedError(f"{target} files are not written; choose a container with --remux")
    if recipe.codec is not None:
        encoded = f"{stem}-encoded.{target}"
        encode(path, encoded, target, recipe)
        if recipe.split is None:
            return target, [Piece(encoded, 0.0, 0.0)]
        path = encoded
    pieces = remux(path, stem, target, faststart=recipe.faststart, split=recipe.split)
    if recipe.codec is not None:
        os.unlink(path)
    return target, pieces


def _clip(task: Task, number: int, ext: str, piece: Piece, rest: Request, cues: list[vtt.Cue] | None) -> Sample:
    files = {ext: piece.path, **dict(rest)}
    name = f"{number:04}"
    if cues is not None:
        files["vtt"] = os.path.join(task.scratch, f"{name}.vtt")
        Path(files["vtt"]).write_text(vtt.cut(cues, round(piece.start * 1000), round(piece.end * 1000)), "utf-8")
    times = {"clip_of": task.key, "clip_start": round(piece.start, 6), "clip_end": round(piece.end, 6)}
    files["json"] = with_fields(files.get("json"), times, task.scratch, name)
    return Sample(f"-{name}", sorted(files.items()))
