"""A worker's whole task for one group of files: unpack, convert, describe.

Invariants: the same files, recipe and library versions give the same samples. New files go only into the task's scratch
folder, which the packer makes and removes.
Failure behaviour: `Failure` names the file and the reason. One bad file rejects the whole group. If the scratch folder
is full, `Failure` says that the file is not at fault (`ours`).
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from headrace.dataio.shards.media import describe
from headrace.dataio.shards.media.facts import Clip, Failure, Outcome, Prepared, Request, Span, Task
from headrace.dataio.shards.media.sample_json import Sample, with_fields

_READ = 4 * limits.MIB
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def prepare(task: Task) -> Outcome:
    """Make the samples of one group of files."""
    spans: dict[str, Span] = {}
    at = task.files[0]
    try:
        if task.scratch:
            os.makedirs(task.scratch, exist_ok=True)
        for at in task.files:
            spans[_unpacked(at, task.scratch)] = at
        files = _with_manifest([(span.ext, path) for path, span in spans.items()], task)
        at = task.files[0]
        made = [Sample("", files)]
        if task.recipe.changes:
            from headrace.dataio.shards.media.convert import convert

            made = convert(files, task)
    except HeadraceError as error:
        return Failure(at.named, error.code, error.message)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return Failure(at.named, CapacityError.code, error.strerror or str(error), ours=True)
        return Failure(at.named, CorruptionError.code, f"cannot be read or converted: {error.strerror or error}")
    except MemoryError:
        return Failure(at.named, CapacityError.code, "converting it takes too much memory")
    clips = []
    for sample in made:
        answer = describe.describe(sample.files)
        if isinstance(answer, Failure):
            return Failure(spans.get(answer.path, at).named, answer.code, answer.reason)
        clips.append(Clip(suffix=sample.suffix, described=answer))
    return Prepared(tuple(clips))


def _unpacked(span: Span, scratch: str) -> str:
    """Return the path of a file with the span's bytes. A span in an archive is copied to the scratch folder."""
    if span.length < 0:
        return span.path
    path = os.path.join(scratch, f"{span.offset}.{span.ext.replace('/', '_')}")
    left = span.length
    with open(span.path, "rb") as source, open(path, "wb") as target:
        source.seek(span.offset)
        while left:
            piece = source.read(min(left, _READ))
            if not piece:
                raise CorruptionError("ends inside a member: it changed while it was being packed")
            target.write(piece)
            left -= len(piece)
    return path


def _with_manifest(files: Request, task: Task) -> Request:
    """Return the files with the manifest's caption and fields added."""
    there = dict(files)
    if task.caption is not None and "txt" not in there:
        there["txt"] = os.path.join(task.scratch, "manifest.txt")
        Path(there["txt"]).write_text(task.caption, "utf-8")
    if task.fields is not None:
        there["json"] = with_fields(there.get("json"), json.loads(task.fields), task.scratch)
    return sorted(there.items())
