"""Small datasets without media, for tests of what is known from the index alone."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.sample import AudioInfo, KeyFrame, Member, Sample, VideoInfo
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.store.base import Store

SHARD_BYTES = 1 << 30


def video(n: int, **changes: Any) -> VideoInfo:
    height = (360, 720, 1080)[n % 3]
    given: dict[str, Any] = {
        "ext": "mp4",
        "stream": 0,
        "codec": "h264",
        "width": height * 16 // 9,
        "height": height,
        "fps": Fraction(30000, 1001),
        "frames": 90,
        "time_base": Fraction(1, 30000),
        "start_pts": 0,
        "duration_pts": 90_000,
        "pixel_format": "yuv420p",
        "rotation": 0,
        "key_frames": (KeyFrame(0, 0),),
    }
    return VideoInfo(**(given | changes))


def sample(n: int, shard: str, place: int, **changes: Any) -> Sample:
    """Sample `n`: every fifth is sound, the others video; every seventh shows a dog."""
    given: dict[str, Any] = {
        "key": f"k{n:05}",
        "members": (Member("mp4", 512 + 4096 * place, 100 + n % 3000, n),),
        "duration": float(n % 30),
        "video": video(n) if n % 5 else None,
        "audio": None if n % 5 else AudioInfo("wav", 0, "pcm_s16le", 16000, 1, 16000),
        "text": f"a {'Dog' if n % 7 == 0 else 'cat'} {n}" if n % 4 else None,
        "fields": {"score": n / 10, "number": n, "label": "even" if n % 2 == 0 else "odd", "Odd Name": n % 2 == 1},
    }
    return Sample(id=n, shard=shard, **(given | changes))


def make(
    store: Store, numbers: Sequence[int], *, name: str = "set", per_shard: int = 10, per_part: int = 25
) -> list[Sample]:
    """Version 1 with these samples, `per_shard` of them in a shard and `per_part` in an index part; returns them."""
    rows, shards = list[Sample](), list[versions.Shard]()
    for start in range(0, len(numbers), per_shard):
        held = numbers[start : start + per_shard]
        key = f"shards/{len(shards):08}-{name}.tar"
        shards.append(versions.Shard(key=key, size=SHARD_BYTES, samples=len(held)))
        rows += [sample(n, key, place) for place, n in enumerate(held)]
    stored = list[versions.IndexPart]()
    for start in range(0, len(rows), per_part):
        stored += part_writer.store_parts(store, rows[start : start + per_part], len(stored))
    history.publish(
        store, versions.new_document(name, tuple(shards), tuple(stored), version=1, parent=None, message="made")
    )
    return rows
