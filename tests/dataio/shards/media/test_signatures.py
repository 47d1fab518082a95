"""The extension of a medium comes from its bytes, and a name that contradicts them is believed as little as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media.signatures import HEAD_BYTES, extension_of, format_of
from tests.support import audio_corpus
from tests.support.pictures import picture
from tests.support.written_media import MakeWav


def test_real_files_are_recognized_without_their_names(media: Path) -> None:
    files = [path for path in media.iterdir() if path.suffix not in (".md", "") and path.name != "corrupted.mp4"]
    found = {path.name: format_of(path.read_bytes()[:HEAD_BYTES]) for path in files}
    assert found == {path.name: path.suffix[1:] for path in files}


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_encoded_pictures_are_recognized(kind: str) -> None:
    assert format_of(picture(kind)[:HEAD_BYTES]) == kind


@pytest.mark.parametrize(
    ("container", "codec"), [("flac", "flac"), ("mp3", "libmp3lame"), ("opus", "libopus"), ("wav", "pcm_s16le")]
)
def test_encoded_sounds_are_recognized(container: str, codec: str) -> None:
    rate = 48_000 if codec == "libopus" else 44_100
    kind = audio_corpus.Kind("x", container, container, codec, rate=rate, seconds=1)
    assert format_of(audio_corpus.made(kind)[:HEAD_BYTES]) == container


@pytest.mark.parametrize(
    ("head", "ext"),
    [
        (b"\xff\xfb\x90\x00" + bytes(60), "mp3"),  # MPEG 1, layer III, without ID3
        (b"\xff\xf1\x50\x80" + bytes(60), "aac"),
        (b"\xff\xff\xff\xff" + bytes(60), None),
        (b"\x47" + bytes(187) + b"\x47" + bytes(60), "ts"),
        (bytes(4) + b"\x47" + bytes(191) + b"\x47" + bytes(60), "m2ts"),
        (b"\0\0\0\x20ftypavif" + bytes(60), "avif"),
        (b"\0\0\0\x20ftypM4A " + bytes(60), "m4a"),
        (b"\0\0\0\x20ftyp3gp5" + bytes(60), "3gp"),
        (b"GIF89a" + bytes(60), "gif"),
        (b"FORM\0\0\0\0AIFF" + bytes(60), "aif"),
        (b"%PDF-1.7" + bytes(60), None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_headers_are_recognized_or_not(head: bytes, ext: str | None) -> None:
    assert format_of(head) == ext


def test_a_name_chooses_among_the_extensions_of_a_container(make_wav: MakeWav, tmp_path: Path) -> None:
    mp4, wav = b"\0\0\0\x20ftypisom" + bytes(60), make_wav(tmp_path / "a.wav").read_bytes()
    assert extension_of(mp4, "a/b.M4A") == "m4a"
    assert extension_of(mp4, None) == extension_of(mp4, "clip") == extension_of(mp4, "clip.bin") == "mp4"
    assert extension_of(picture("jpg"), "x.JPEG") == "jpg"
    assert extension_of(wav, "x.wav") == "wav"


def test_a_name_of_another_format_and_unknown_bytes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"its name ends in \.mp4, and its bytes are those of a \.png file"):
        extension_of(picture("png"), "x.mp4")
    with pytest.raises(UnsupportedError, match="its bytes have no known format"):
        extension_of(b"hello", "x.mp4")
