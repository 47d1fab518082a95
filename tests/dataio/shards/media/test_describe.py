"""What a sample's files say about it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import xxhash

from headrace.dataio.shards.media.describe import PROMOTED_STRING, describe
from headrace.dataio.shards.media.facts import (
    TEXT_BYTES,
    Clip,
    Described,
    Failure,
    Prepared,
    decode_outcome,
    encode_outcome,
)


def request(*paths: Path) -> list[tuple[str, str]]:
    return [(path.suffix[1:], str(path)) for path in sorted(paths)]


@pytest.fixture
def clip(tmp_path: Path, make_clip) -> Path:
    return make_clip(tmp_path / "a.mp4", frames=6)


def beside(clip: Path, ext: str, content: bytes) -> Path:
    path = clip.with_suffix(f".{ext}")
    path.write_bytes(content)
    return path


def described(*paths: Path) -> Described:
    answer = describe(request(*paths))
    assert isinstance(answer, Described), answer
    return answer


def failed(*paths: Path) -> Failure:
    answer = describe(request(*paths))
    assert isinstance(answer, Failure), answer
    return answer


def test_each_file_is_hashed_and_measured(clip: Path) -> None:
    notes = beside(clip, "srt", b"subtitles")
    facts = described(clip, notes).files
    assert [(f.ext, f.size, f.xxh3) for f in facts] == [
        (p.suffix[1:], len(p.read_bytes()), xxhash.xxh3_64_intdigest(p.read_bytes())) for p in (clip, notes)
    ]


def test_text_and_the_flat_fields_of_the_json_are_taken(clip: Path) -> None:
    long = "x" * (PROMOTED_STRING + 1)
    fields = {
        "label": "räder",
        "n": 3,
        "score": 0.5,
        "ok": True,
        "none": None,
        "nested": {"a": 1},
        "list": [1],
        "long": long,
    }
    found = described(
        clip, beside(clip, "json", json.dumps(fields).encode()), beside(clip, "txt", b"\xef\xbb\xbf a cat \n")
    )
    assert found.text == "a cat"
    assert json.loads(found.fields) == {"label": "räder", "n": 3, "score": 0.5, "ok": True, "none": None}


def test_sound_comes_from_the_video_itself_or_else_from_beside_it(clip: Path, make_wav, media: Path) -> None:
    silent = described(clip, make_wav(clip.with_suffix(".wav")))
    assert silent.video is not None
    assert silent.audio is not None
    assert (silent.video.ext, silent.audio.ext, silent.audio.sample_rate) == ("mp4", "wav", 8000)
    assert silent.duration == pytest.approx(6 / 30)
    own = describe([("mkv", str(media / "pancake_h264.mkv")), ("wav", str(media / "action.wav"))])
    assert isinstance(own, Described)
    assert own.audio is not None
    assert own.audio.ext == "mkv"


@pytest.mark.parametrize(
    ("ext", "content", "reason"),
    [
        ("json", b"{", "not JSON"),
        ("json", b"[1]", "must be an object"),
        ("json", b'{"a": NaN}', "not JSON"),
        ("json", b'{"a": "\\ud800"}', "not JSON"),
        ("json", b"[" * 100_000, "not JSON"),
        ("json", b"\xff", "not UTF-8"),
        ("txt", b"\xff", "not UTF-8"),
        ("txt", b"x" * (TEXT_BYTES + 1), "larger than 1.0 MiB"),
        ("wav", b"", "empty"),
    ],
)
def test_one_bad_member_refuses_the_sample_and_is_named(clip: Path, ext: str, content: bytes, reason: str) -> None:
    bad = beside(clip, ext, content)
    answer = failed(clip, bad)
    assert answer.path == str(bad)
    assert reason in answer.reason


def test_a_file_that_went_away_is_named(clip: Path) -> None:
    answer = failed(clip.with_suffix(".mov"))
    assert "No such file" in answer.reason


def test_answers_survive_the_way_between_processes(clip: Path, make_wav) -> None:
    for answer in (described(clip, make_wav(clip.with_suffix(".wav"))), Failure("a", "corruption", "why")):
        outcome = answer if isinstance(answer, Failure) else Prepared((Clip(suffix="-0000", described=answer),))
        assert decode_outcome(encode_outcome(outcome)) == outcome


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"type": "described"}), b"\x93\x01\x02\x03"])
def test_a_malformed_answer_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_outcome(data)
