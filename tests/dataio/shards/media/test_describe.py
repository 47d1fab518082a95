"""A description holds all facts of a sample, among them the pieces that opening a long file reads."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import xxhash
from msgspec.structs import replace

from headrace.dataio import Dataset, index, pack
from headrace.dataio.core import limits
from headrace.dataio.shards.media import describe as describe_module
from headrace.dataio.shards.media.describe import PROMOTED_STRING, describe
from headrace.dataio.shards.media.messages import (
    TEXT_BYTES,
    Clip,
    Description,
    Failure,
    FileInfo,
    Prepared,
    decode_outcome,
    encode_outcome,
)
from headrace.dataio.shards.media.probe import Probe
from headrace.dataio.shards.pieces import Hasher, piece_size
from headrace.dataio.shards.sample import Pieces
from tests.support.long_media import recorded
from tests.support.written_media import MakeClip, MakeWav


def request(*paths: Path) -> list[tuple[str, str]]:
    return [(path.suffix[1:], str(path)) for path in sorted(paths)]


@pytest.fixture
def clip(tmp_path: Path, make_clip: MakeClip) -> Path:
    return make_clip(tmp_path / "a.mp4", frames=6)


def sibling(clip: Path, ext: str, content: bytes) -> Path:
    path = clip.with_suffix(f".{ext}")
    path.write_bytes(content)
    return path


def described(*paths: Path) -> Description:
    answer = describe(request(*paths))
    assert isinstance(answer, Description), answer
    return answer


def captioned(clip: Path, caption: object, text_field: str | None = None) -> Description:
    """The clip, described with a JSON file that has this caption."""
    document = json.dumps({"caption": caption, "label": 1}, ensure_ascii=False).encode()
    answer = describe(request(clip, sibling(clip, "json", document)), text_field)
    assert isinstance(answer, Description), answer
    return answer


def failed(*paths: Path) -> Failure:
    answer = describe(request(*paths))
    assert isinstance(answer, Failure), answer
    return answer


def test_each_file_is_hashed_and_measured(clip: Path) -> None:
    notes = sibling(clip, "srt", b"subtitles")
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
        clip, sibling(clip, "json", json.dumps(fields).encode()), sibling(clip, "txt", b"\xef\xbb\xbf a cat \n")
    )
    assert found.text == "a cat"
    assert json.loads(found.fields) == {"label": "räder", "n": 3, "score": 0.5, "ok": True, "none": None}


@pytest.mark.parametrize(
    ("caption", "text"),
    [
        (" ein Rad \n", "ein Rad"),
        (["first", "second"], "first"),
        (["", " \t", " third"], "third"),
        ("x" * TEXT_BYTES, "x" * TEXT_BYTES),
        (["x", "y" * (TEXT_BYTES + 1)], "x"),
        (None, None),
        ("", None),
        ("  ", None),
        ([], None),
        (["", " "], None),
    ],
)
def test_the_caption_of_the_json_is_the_text(clip: Path, caption: object, text: str | None) -> None:
    found = captioned(clip, caption)
    assert (found.text, found.notes) == (text, ())
    assert json.loads(found.fields)["label"] == 1


@pytest.mark.parametrize(
    ("caption", "problem"),
    [
        (3, "is a number"),
        (0.5, "is a number"),
        (False, "is true or false"),
        ({"en": "a"}, "is an object"),
        (["a", 1], "is a list with other values than strings"),
        ([["a"]], "is a list with other values than strings"),
        (["a", None], "is a list with other values than strings"),
        ("é" * (TEXT_BYTES // 2) + "x", "is larger than 1.0 MiB"),
        (["é" * TEXT_BYTES, "a"], "is larger than 1.0 MiB"),
    ],
)
def test_a_caption_of_another_kind_is_no_text_and_is_remarked(clip: Path, caption: object, problem: str) -> None:
    found = captioned(clip, caption)
    assert (found.text, found.notes) == (None, (f"its text is not taken from the .json: 'caption' {problem}",))
    sibling(clip, "vtt", b"WEBVTT\n\n00:00.000 --> 00:01.000\nwords\n")
    with_words = described(clip, clip.with_suffix(".json"), clip.with_suffix(".vtt"))
    assert (with_words.text, with_words.notes) == ("words", found.notes)


@pytest.mark.parametrize("caption", ["\\ud800", "a" * (PROMOTED_STRING + 1) + "\\udfff"])
@pytest.mark.parametrize("form", ['{"caption": "%s"}', '{"caption": ["", "%s"]}'])
def test_a_caption_that_is_not_unicode_text_refuses_the_sample(clip: Path, caption: str, form: str) -> None:
    answer = failed(clip, sibling(clip, "json", (form % caption).encode()))
    assert answer.path.endswith(".json")
    assert "not JSON" in answer.reason


def test_the_text_is_the_txt_or_else_the_json_s_or_else_the_subtitles(clip: Path) -> None:
    document = {"caption": "json's", "title": "title's", "text": "another"}
    files = [
        clip,
        sibling(clip, "json", json.dumps(document).encode()),
        sibling(clip, "vtt", b"WEBVTT\n\n00:00.000 --> 00:01.000\nwords\n"),
    ]

    def text(files: list[Path], text_field: str | None = None) -> str | None:
        answer = describe(request(*files), text_field)
        assert isinstance(answer, Description), answer
        assert answer.notes == ()
        return answer.text

    assert text(files) == "json's"
    assert text(files, "title") == "title's"
    assert text(files, "missing") == "words"
    assert text(files[:2], "missing") is None
    txt = sibling(clip, "txt", b"txt's")
    assert text([*files, txt]) == text([*files, txt], "title") == "txt's"
    files[1].write_text('{"caption": 3}')  # no remark: nothing asks for it
    assert text([*files, txt]) == "txt's"
    txt.write_text("")
    assert text([*files, txt]) == ""


def test_sound_comes_from_the_video_itself_or_else_from_beside_it(clip: Path, make_wav: MakeWav, media: Path) -> None:
    silent = described(clip, make_wav(clip.with_suffix(".wav")))
    assert silent.video is not None
    assert silent.audio is not None
    assert (silent.video.ext, silent.audio.ext, silent.audio.sample_rate) == ("mp4", "wav", 8000)
    assert silent.duration == pytest.approx(6 / 30)
    own = describe([("mkv", str(media / "pancake_h264.mkv")), ("wav", str(media / "action.wav"))])
    assert isinstance(own, Description)
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
    bad = sibling(clip, ext, content)
    answer = failed(clip, bad)
    assert answer.path == str(bad)
    assert reason in answer.reason


def test_a_file_that_went_away_is_named(clip: Path) -> None:
    answer = failed(clip.with_suffix(".mov"))
    assert "No such file" in answer.reason


def test_a_file_that_grows_is_read_only_a_byte_beyond_its_size() -> None:
    growing = "/proc/version"  # the kernel says that it is empty, but it is not
    content = Path(growing).read_bytes()
    assert len(content) > 1
    found = describe_module._file_info("txt", growing)
    assert found.size == 0
    assert found.xxh3 == xxhash.xxh3_64_intdigest(content[:1])


def test_answers_survive_the_way_between_processes(clip: Path, make_wav: MakeWav) -> None:
    for answer in (described(clip, make_wav(clip.with_suffix(".wav"))), Failure("a", "corruption", "why")):
        outcome = answer if isinstance(answer, Failure) else Prepared((Clip(suffix="-0000", described=answer),))
        assert decode_outcome(encode_outcome(outcome)) == outcome


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"type": "described"}), b"\x93\x01\x02\x03"])
def test_a_malformed_answer_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_outcome(data)


# --- header pieces

FRAMES = 200
CONTAINERS: dict[str, tuple[str, dict[str, str]]] = {
    "index in front": ("mp4", {"movflags": "faststart"}),
    "index behind": ("mp4", {}),
    "cues": ("mkv", {}),
}


@pytest.fixture(scope="module")
def packets() -> bytes:
    """A film of noise, of which each frame is a key frame of 20 KiB or so."""
    target, noise = io.BytesIO(), np.random.default_rng(1)
    with av.open(target, "w", format="matroska") as output:
        stream: Any = output.add_stream("mjpeg", rate=25, options={"q": "2"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuvj420p"
        for number in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(noise.integers(0, 256, (240, 320, 3), np.uint8), format="rgb24")
            frame.pts = number
            output.mux(stream.encode(frame.reformat(format="yuvj420p")))
        output.mux(stream.encode(None))
    return target.getvalue()


def film(packets: bytes, path: Path, options: dict[str, str]) -> Path:
    with av.open(io.BytesIO(packets), "r") as source, av.open(str(path), "w", options=options) as output:
        copy = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = copy
                output.mux(packet)
    return path


def described_file(path: Path) -> tuple[FileInfo, Description]:
    found = describe([(path.suffix[1:], str(path))])
    assert isinstance(found, Description)
    return found.files[0], found


def head_of(fact: FileInfo) -> set[int]:
    assert fact.pieces is not None
    return {number for first, many in fact.pieces.head for number in range(first, first + many)}


def count(fact: FileInfo) -> int:
    assert fact.pieces is not None
    return len(fact.pieces.digests) // 8


@pytest.mark.parametrize("kind", CONTAINERS)
def test_wherever_decoding_begins_no_more_is_read_than_the_head_and_what_lies_there(
    kind: str, packets: bytes, tmp_path: Path
) -> None:
    ext, options = CONTAINERS[kind]
    fact, found = described_file(film(packets, tmp_path / f"film.{ext}", options))
    assert fact.pieces is not None
    assert found.video is not None
    last = count(fact) - 1
    assert last > 8
    at_the_end = set[int]() if kind == "index in front" else {last}
    looked_at = 768 * limits.KIB // fact.pieces.size  # of Matroska, some frames are looked at
    assert {0} | at_the_end <= head_of(fact) <= set(range(looked_at)) | at_the_end
    for key in found.video.key_frames[:: FRAMES // 7]:
        ways = [describe_module._pieces_read(fact, (0, key.pts), trusting) for trusting in (True, False)]
        read = set.union(*ways)
        here = key.at // fact.pieces.size
        assert read - head_of(fact) <= {here - 1, here, here + 1}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_key_frames_place_is_where_its_bytes_are(kind: str, packets: bytes, tmp_path: Path) -> None:
    ext, options = CONTAINERS[kind]
    path = film(packets, tmp_path / f"film.{ext}", options)
    _, found = described_file(path)
    assert found.video is not None
    data = path.read_bytes()
    with av.open(str(path)) as container:
        payloads = {packet.pts: bytes(packet) for packet in container.demux(video=0) if packet.size}
    assert len(found.video.key_frames) == len(payloads) == FRAMES
    for key in found.video.key_frames:
        assert 0 <= data.index(payloads[key.pts], key.at) - key.at < 64  # Matroska has a block's header before it


def test_a_file_that_has_to_be_read_through_to_find_a_place_says_so(packets: bytes, tmp_path: Path) -> None:
    fact, _ = described_file(film(packets, tmp_path / "film.mkv", {"live": "1"}))  # has no cues
    assert len(head_of(fact)) >= count(fact) // 2 - 1


def test_of_sound_alone_the_head_is_what_two_instants_have_in_common(
    tmp_path: Path, make_wav: MakeWav, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wav(tmp_path / "sound:long.wav", seconds=300)
    monkeypatch.chdir(tmp_path)
    path = Path("sound:long.wav")  # a name that could be an address
    fact, found = described_file(path)
    assert found.audio is not None
    assert found.video is None
    assert 0 in head_of(fact)
    assert len(head_of(fact)) < count(fact) / 2


def test_short_files_have_neither_head_nor_places(tmp_path: Path, make_clip: MakeClip) -> None:
    fact, found = described_file(make_clip(tmp_path / "a.mp4"))
    assert fact.pieces is None
    assert found.video is not None
    assert {key.at for key in found.video.key_frames} == {-1}


def test_a_file_that_cannot_be_opened_as_loaders_do_has_no_head(packets: bytes, tmp_path: Path) -> None:
    path = film(packets, tmp_path / "film.mp4", {})
    fact, found = described_file(path)
    assert fact.pieces is not None
    assert found.video is not None
    plain = replace(fact, pieces=replace(fact.pieces, head=()))
    other = replace(found.video, stream=1)
    assert describe_module.with_head(plain, Probe("mov", found.duration, other, None)) == plain
    data = path.read_bytes()
    for changed in (bytes(fact.size), data[: fact.size // 2], b"\0\0\0\5" + data[4:]):  # in between
        path.write_bytes(changed)
        assert describe_module.with_head(plain, Probe("mov", found.duration, found.video, None)) == plain


def test_long_files_that_are_no_media_have_pieces_too_and_short_ones_beside_them_none(
    tmp_path: Path, make_wav: MakeWav
) -> None:
    make_wav(tmp_path / "in" / "a.wav")
    data = struct.pack("<300000I", *range(300_000))
    (tmp_path / "in" / "a.bin").write_bytes(data)
    with pack(tmp_path / "in", tmp_path / "ds", workers=1) as dataset:
        found = {member.ext: member.pieces for member in dataset.sample(0).members}
    hasher = Hasher(piece_size(len(data)))
    hasher.update(data)
    assert found == {"bin": hasher.pieces(), "wav": None}
    assert found["bin"] == Pieces(64 * limits.KIB, found["bin"].digests if found["bin"] else b"")


def test_indexing_in_place_finds_what_packing_found(packets: bytes, tmp_path: Path, make_wav: MakeWav) -> None:
    film(packets, tmp_path / "in.mkv", {})
    make_wav(tmp_path / "sound.wav", seconds=100)
    (tmp_path / "sound.bin").write_bytes(bytes(2 * limits.MIB))
    names = [tmp_path / name for name in ("in.mkv", "sound.wav", "sound.bin")]
    with pack(names, tmp_path / "ds", workers=1) as packed:
        samples = packed.samples(range(2))
    assert [(m.ext, m.pieces is not None and m.pieces.head != ()) for one in samples for m in one.members] == [
        ("mkv", True),
        ("bin", False),
        ("wav", True),
    ]
    with index(str(tmp_path / "ds" / "shards" / "*.tar"), tmp_path / "other", workers=1) as indexed:
        again = indexed.samples(range(2))
    assert [replace(one, shard="") for one in again] == [replace(one, shard="") for one in samples]


def test_frames_of_mp3_are_marked_also_when_indexed_in_place(tmp_path: Path) -> None:
    recorded(tmp_path / "a.mp3", "libmp3lame")
    with pack([tmp_path / "a.mp3"], tmp_path / "ds", workers=1) as packed:
        (sample,) = packed
    with index(str(tmp_path / "ds" / "shards" / "*.tar"), tmp_path / "other", workers=1) as indexed:
        (again,) = indexed
    (member,) = sample.members
    assert member.pieces is not None
    assert member.pieces.head == ((0, 1),)
    assert [at // member.pieces.size for at, _ in member.pieces.marks] == list(range(len(member.pieces.marks)))
    assert again.members == sample.members


def test_views_and_versions_made_of_versions_keep_pieces_and_places(
    packets: bytes, tmp_path: Path, make_wav: MakeWav
) -> None:
    film(packets, tmp_path / "in.mkv", {})
    make_wav(tmp_path / "sound.wav", seconds=100)
    with pack([tmp_path / "in.mkv"], tmp_path / "one", workers=1) as one:
        (whole,) = one.samples([0])
        with pack([tmp_path / "sound.wav"], tmp_path / "two", workers=1) as two:
            (sound,) = two.samples([0])
            merged = two.merge(one)
        with Dataset(tmp_path / "two", trust_mounts=True) as both, merged:
            for found in (both.where("duration < 9").sample(0), merged.remove(["sound"]).sample(0)):
                assert found.members == whole.members
                assert found.video == whole.video
            assert both.where("key = 'sound'").save().sample(0).members == sound.members
