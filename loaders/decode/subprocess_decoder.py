"""Decoding in subprocesses, so that a crash or hang does not affect the trainer.

Purpose: survive failures that no check can prevent, such as a segmentation fault or an endless loop inside a codec.
Invariants: the subprocesses run `PyAVDecoder` and `decode_audio`, so the pixels and samples are the same. A process
that takes longer than `seconds` is killed. If a process crashes or is killed, the sample that it was decoding counts as
damaged, and the next request gets a new process. Decoding time depends on the machine, so `seconds` should be far above
what any undamaged sample needs.
Failure behaviour: `CorruptionError` with the signal or the time limit, at the position of the damaged sample.
`UnsupportedError` if the processes do not start. The cost is one copy of the compressed bytes and of the pixels through
a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.errors import CorruptionError, DeadlineError, HeadraceError, UsageError
from headrace.dataio.core.programs import run_module
from headrace.dataio.shards.sample import AudioInfo, VideoInfo
from headrace.dataio.shards.workers.worker_pool import WorkerPool
from headrace.loaders.audio.decode import F32
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.decode import resize, subprocess_worker
from headrace.loaders.decode.base import MAX_CLIP_BYTES, Color, Decoded, Request, whole_clip_bytes
from headrace.loaders.decode.planes import clip_shape, sample_type
from headrace.loaders.decode.pyav import is_one_pass
from headrace.loaders.fetch.partial_file import Media, PartialFile, SentPieces

SECONDS = 60.0
"""Time limit of a process for one clip or window."""
_HEADER = 1 << 20
_MAX_PIECE_REQUESTS = 8
"""How often a process may request a missing piece of a file. After that it receives the whole file."""
COMMAND = run_module("headrace.loaders.decode.subprocess_worker")


class SubprocessDecoder:
    """A `Decoder` whose subprocesses start on demand.

    Args:
        workers: maximum number of processes.
        seconds: time limit for one clip or window.
        command: command that starts a process. Default: `headrace.loaders.decode.subprocess_worker`.
    """

    name = "isolated"

    def __init__(self, workers: int, seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> None:
        if not 0 < seconds <= 3600:
            raise UsageError(
                f"decode_in_subprocess={seconds!r} is not a time limit", hint="seconds, above 0 and up to 3600"
            )
        self._seconds = seconds
        max_bytes = min(MAX_CLIP_BYTES + _HEADER, (1 << 32) - 1)
        self._pool = WorkerPool(command, subprocess_worker.HELLO, workers, answer_bytes=max_bytes)

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        return [self._decode(request) for request in requests]

    def decode_audio(
        self, data: Media, info: AudioInfo, start: Fraction, spec: AudioSpec, samples: int, from_first: bool
    ) -> tuple[F32, int]:
        """Like `decode_audio`, in a subprocess."""
        result = self._ask(
            data,
            lambda sent: subprocess_worker.AudioTask(
                sent, info=info, start=start, spec=spec, samples=samples, from_first=from_first
            ),
        )
        audio = np.frombuffer(result.data, np.float32).reshape(result.shape).copy()
        if audio.shape != (spec.channels, samples) or len(result.numbers) != 1:
            raise CorruptionError("reading it made the decoder answer nonsense")
        return audio, result.numbers[0]

    def clip_bytes(self, info: VideoInfo, frames: int, size: tuple[int, int] | None, color: Color) -> int:
        return whole_clip_bytes(info, frames)

    def close(self) -> None:
        self._pool.close()

    def _decode(self, request: Request) -> Decoded | HeadraceError:
        fit, planes = request.fit if is_one_pass(request) else None, request.planes
        try:
            result = self._ask(
                request.data,
                lambda sent: subprocess_worker.ClipTask(
                    sent, info=request.info, wanted=request.wanted, color=request.color, fit=fit, planes=planes
                ),
            )
        except HeadraceError as error:
            return error
        clip = len(request.wanted.values)
        expected: tuple[int, ...] = (clip, request.info.height, request.info.width, 3)
        kind: np.dtype[Any] = np.dtype(np.uint8)
        if planes is not None:
            expected, kind = clip_shape(request, planes), np.dtype(sample_type(planes.pixel_format))
        elif fit is not None:
            expected = (clip, 3, *fit.size)
        nbytes = np.prod(expected) * kind.itemsize
        if (
            result.shape != expected
            or len(result.data) != nbytes
            or len(result.numbers) != clip
            or (planes is None) != (result.color is None)
        ):
            return CorruptionError("reading it made the decoder answer nonsense")
        frames = torch.from_numpy(np.frombuffer(bytearray(result.data), kind).reshape(expected))
        is_finished = fit is not None or planes is not None
        return Decoded(frames if is_finished else resize.apply(frames, request.fit), result.numbers, result.color)

    def _ask(self, data: Media, task: Callable[[bytes | SentPieces], subprocess_worker.Task]) -> subprocess_worker.Done:
        """Send the task to a process, and return its result.

        If only some pieces of the file are in memory, the process names a missing piece, and receives it with the next
        attempt.
        """
        if not isinstance(data, PartialFile):
            return self._done(task(bytes(data[:])))
        for _ in range(_MAX_PIECE_REQUESTS):
            answer = self._answer(task(data.sent_pieces()))
            if isinstance(answer, subprocess_worker.Done):
                return answer
            data.load(answer.piece)
        return self._done(task(bytes(data[:])))

    def _done(self, task: subprocess_worker.Task) -> subprocess_worker.Done:
        answer = self._answer(task)
        if isinstance(answer, subprocess_worker.Missing):
            raise CorruptionError("reading it made the decoder answer nonsense")
        return answer

    def _answer(self, task: subprocess_worker.Task) -> subprocess_worker.Done | subprocess_worker.Missing:
        try:
            answer: subprocess_worker.Answer = self._pool.ask(
                subprocess_worker.encode_task(task), self._seconds, subprocess_worker.decode_answer
            )
        except DeadlineError as error:  # the time limit means that this file is at fault, not a network
            raise CorruptionError(f"decoding it takes longer than {self._seconds:g} s") from error
        if isinstance(answer, subprocess_worker.Failed):
            raise subprocess_worker.ERRORS.get(answer.code, CorruptionError)(answer.message, hint=answer.hint)
        return answer
