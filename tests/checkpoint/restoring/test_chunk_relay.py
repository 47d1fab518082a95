"""Ranks that need the same chunks read each once and pass it on; an error of one rank ends all of them."""

from __future__ import annotations

import random

import pytest

from headrace.checkpoint.format.chunking import whole
from headrace.checkpoint.restoring import chunk_relay
from headrace.dataio.core.errors import CorruptionError, TransientError
from tests.support.checkpoint_states import RUN  # noqa: F401  (the run that `Job` saves)
from tests.support.divided_restores import Job, content, rows_of

BIG = (300, 1024)
COUNT = 5


def saved(job: Job) -> tuple[object, list[dict[str, list[object]]]]:
    """Tensors that a few ranks saved and that random ranks need whole."""
    draw = random.Random(1)
    base = job.save([rows_of(f"t{number}", whole(BIG)) for number in range(COUNT)])
    wanted = [{f"t{n}": [whole(BIG)] for n in range(COUNT) if draw.random() < 0.7} for _ in range(9)]
    return base, wanted  # type: ignore[return-value]


@pytest.mark.parametrize("limit", [1, 600_000, chunk_relay.ROUND_BYTES])
def test_ranks_of_which_each_needs_other_chunks_finish_in_rounds_of_their_own(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_relay, "ROUND_BYTES", limit)
    job = Job()
    base, wanted = saved(job)
    job.sent.clear()
    found = job.restore(base, wanted)  # type: ignore[arg-type]
    assert not job.errors, job.errors
    for boxes, restored in zip(wanted, found, strict=True):
        assert restored.boxes == {name: [content(name, BIG).tobytes()] for name in boxes}
    assert sum(key.startswith("packs/") for _, key in job.sent) == COUNT


def test_damage_that_the_reader_finds_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_relay, "ROUND_BYTES", 1)
    job = Job()
    base, wanted = saved(job)
    key = next(key for key in job.bucket.objects if key.startswith("packs/"))
    data, at = job.bucket.objects[key]
    job.bucket.objects[key] = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], at
    job.restore(base, wanted)  # type: ignore[arg-type]
    assert len(job.errors) == len(wanted)
    kinds = [type(error) for error in job.errors.values()]
    assert kinds.count(CorruptionError) == 1
    assert kinds.count(TransientError) == len(wanted) - 1


def test_bytes_that_change_between_two_ranks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    base, wanted = saved(job)
    real = chunk_relay.ChunkRelay._send

    def flipped(self: chunk_relay.ChunkRelay, message: object, rank: int) -> object:
        other = message.clone()  # type: ignore[attr-defined]
        other[7] ^= 1
        return real(self, other, rank)

    monkeypatch.setattr(chunk_relay.ChunkRelay, "_send", flipped)
    job.restore(base, wanted)  # type: ignore[arg-type]
    assert len(job.errors) == len(wanted)
    assert any(isinstance(e, CorruptionError) and "differ from those saved" in str(e) for e in job.errors.values())
