"""The options of loaders that do not change the order: cuts, colours, dtypes, layouts, columns, transforms, windows of sound."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import pytest
import torch

from headrace.dataio import pack
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import (
    Audio,
    AudioLoader,
    AudioSpec,
    Clip,
    FileLoader,
    Loader,
    LogMel,
    Mixture,
    VideoLoader,
    Window,
)
from headrace.loaders.decode.resize import fit
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.processors.video import Cut
from tests.support import video_corpus
from tests.support.written_media import write_wav

NAMES = ("h264.mp4", "h264-late.mkv", "h264-vfr.mkv", "vp8.webm", "mpeg4.mp4", "mjpeg.mkv")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Six generated clips, half of them with a JSON file."""
    folder = tmp_path_factory.mktemp("options")
    for number, one in enumerate(one for one in video_corpus.ALL if one.name in NAMES):
        (folder / one.name).write_bytes(video_corpus.make(one))
        if number % 2 == 0:
            (folder / one.name).with_suffix(".json").write_text(
                json.dumps({"label": number, "caption": f"clip {number}"})
            )
            (folder / one.name).with_suffix(".txt").write_text(f"text {number}")
    with pack([folder], folder / "ds", workers=1) as packed:
        yield packed


@pytest.fixture
def make(clips: Dataset) -> Iterator[Callable[..., VideoLoader]]:
    opened: list[VideoLoader] = []

    def loader(batch_size: int = 6, **options: Any) -> VideoLoader:
        settings: dict[str, Any] = {"clip": Clip(2, per_video=2), "size": (24, 32), "num_threads": 2, "sidecar": None}
        opened.append(VideoLoader(clips, batch_size, **(settings | options)))
        return opened[-1]

    yield loader
    for one in opened:
        one.close()


def first(loader: Any) -> dict[str, Any]:
    batch: dict[str, Any] = next(iter(loader))
    return batch


def test_columns_of_the_index_and_fields_of_the_json_come_with_the_batch(make: Any, clips: Dataset) -> None:
    batch = first(make(columns=["label", "caption", "fields.caption", "width", "duration"]))
    samples = [clips.sample(int(number)) for number in batch["id"]]
    assert batch["label"] == [sample.fields.get("label") for sample in samples]
    assert {type(label) for label in batch["label"]} == {int, type(None)}
    assert batch["fields.caption"] == [sample.fields.get("caption") for sample in samples]
    assert batch["caption"] == batch["text"]  # it has another text
    assert set(batch["caption"]) & set(batch["fields.caption"]) == {None}
    assert batch["width"] == [64] * 6
    assert batch["duration"] == [sample.duration for sample in samples]
    assert batch["text"] == [sample.text for sample in samples]
    for wrong in ("no such", "video", "key", "fields.no such", "fields."):
        with pytest.raises(UsageError, match=wrong):
            make(columns=[wrong])


def test_caption_is_a_column_of_samples_without_json_and_in_every_loader(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "in").mkdir()
    write_wav(tmp_path / "in" / "a.wav", seconds=0.02)
    (tmp_path / "in" / "a.txt").write_text("a text")
    with pack([tmp_path / "in"], tmp_path / "ds", workers=1) as dataset:
        assert dataset.columns(["caption", "key", "text"]).to_pydict() == {
            "caption": ["a text"],
            "key": ["a"],
            "text": ["a text"],
        }
        assert dataset.where("caption = 'a text'").columns(["caption"]).column_names == ["caption"]
        with pytest.raises(UsageError, match="did you mean caption"):
            dataset.columns(["captions"])
        options: dict[str, Any] = {"columns": ["caption"], "sidecar": None}
        with AudioLoader(dataset, 1, **options) as loader:
            assert first(loader)["caption"] == ["a text"]
        with FileLoader(dataset, 1, files=["wav"], **options) as loader:
            assert first(loader)["caption"] == ["a text"]
        with Loader(dataset, 1, fields={"sound": Audio()}, **options) as loader:
            assert first(loader)["caption"] == ["a text"]
        assert "has no text" not in caplog.text


def test_an_index_without_the_texts_of_json_captions_is_warned_of(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "in").mkdir()
    write_wav(tmp_path / "in" / "a.wav", seconds=0.02)
    (tmp_path / "in" / "a.json").write_text('{"caption": "a dog"}')
    with (
        pack([tmp_path / "in"], tmp_path / "ds", workers=1, text_field="title") as dataset,
        AudioLoader(dataset, 1, columns=["caption", "fields.caption"], sidecar=None) as loader,
    ):
        batch = first(loader)
    assert (batch["caption"], batch["fields.caption"]) == ([None], ["a dog"])
    assert "the index has no text of samples whose JSON has a caption" in caplog.text


def test_a_json_field_with_the_name_of_a_column_is_delivered_by_its_full_name(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "in").mkdir()
    write_wav(tmp_path / "in" / "a.wav", seconds=0.02)
    (tmp_path / "in" / "a.json").write_text('{"channels": 99}')
    with (
        pack([tmp_path / "in"], tmp_path / "ds", workers=1) as dataset,
        AudioLoader(dataset, 1, columns=["channels", "fields.channels"], sidecar=None) as loader,
    ):
        batch = first(loader)
    assert (batch["channels"], batch["fields.channels"]) == ([1], [99])
    assert "the JSON's field is 'fields.channels'" in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", torch.float32])
def test_floats_are_pixels_from_zero_to_one(make: Any, dtype: Any) -> None:
    whole, floats = first(make()), first(make(dtype=dtype))
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert floats["video"].dtype == kind
    tolerance = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[kind]
    assert (floats["video"].float() - whole["video"] / 255).abs().max() < tolerance


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", None])
@pytest.mark.parametrize("layout", ["TCHW", "CTHW", "THWC"])
def test_normalised_pixels_are_the_same_in_every_dtype_and_layout(make: Any, dtype: str | None, layout: str) -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    whole = first(make())["video"] / 255
    expected = (whole - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    found = first(make(normalize=(mean, std), dtype=dtype, layout=layout))["video"]
    order = {"TCHW": (0, 1, 2, 3, 4), "CTHW": (0, 2, 1, 3, 4), "THWC": (0, 1, 3, 4, 2)}[layout]
    assert found.is_contiguous()
    tolerance = {"float32": 1e-5, None: 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    assert (found.float() - expected.permute(*order)).abs().max() < tolerance


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"layout": "HWTC"}, {"dtype": "uint8", "normalize": ((0,) * 3, (1,) * 3)}]
)
def test_impossible_pixels_are_refused(make: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**wrong)


def test_random_cuts_and_mirrors_are_drawn_from_the_place_alone(make: Any, clips: Dataset) -> None:
    options = {"size": (20, 20), "crop": "random", "flip_prob": 0.5, "seed": 3}
    alone = first(make(**options))
    ranks = [first(make(batch_size=3, rank=rank, world_size=2, **options)) for rank in (0, 1)]
    assert torch.equal(torch.cat([rank["video"] for rank in ranks]), alone["video"])
    loader = make(**options)
    first(loader)
    state = loader.state_dict()
    after = first(loader)
    loader.load_state_dict(state)
    assert torch.equal(first(loader)["video"], after["video"])


def test_cuts_are_spread_over_the_whole_picture_and_mirrors_as_often_as_asked(clips: Dataset) -> None:
    sample = clips.sample(0)
    places = [SampleRef(epoch, 0, sample) for epoch in range(400)]
    cut = Cut("random", 0.25)
    tops = np.array([cut.at(place)[0] for place in places])
    assert 0 <= tops.min() < 0.05 < 0.95 < tops.max() < 1
    assert 60 < sum(cut.mirrored(place) for place in places) < 140
    assert cut.at(places[0])[0] != cut.at(places[0])[1]
    frames = torch.randint(0, 256, (2, 30, 40, 3), dtype=torch.uint8)
    assert torch.equal(fit(frames, (30, 10), at=(0.0, 0.0)), frames.permute(0, 3, 1, 2)[..., :10])
    assert torch.equal(fit(frames, (30, 10), at=(0.0, 0.999)), frames.permute(0, 3, 1, 2)[..., 30:])
    assert torch.equal(fit(frames, None, mirror=True), frames.permute(0, 3, 1, 2).flip(3))
    for wrong in ({"crop": "top"}, {"flip_prob": 2.0}):
        with pytest.raises(UsageError):
            Cut(**wrong)


def test_without_antialias_pixels_are_those_of_plain_bilinear_scaling(make: Any) -> None:
    whole = first(make(size=None, clip=Clip(2, start="center")))["video"]
    plain = first(make(size=(12, 16), antialias=False, clip=Clip(2, start="center")))["video"]
    smooth = first(make(size=(12, 16), clip=Clip(2, start="center")))["video"]
    flat = whole.view(-1, *whole.shape[2:])
    expected = torch.nn.functional.interpolate(flat.float(), (12, 16), mode="bilinear").view_as(plain)
    assert (plain.float() - expected).abs().max() <= 1
    assert not torch.equal(plain, smooth)


@pytest.mark.parametrize(
    ("color", "space", "matrix"),
    [("bt601", "bt709", "bt601"), ("tagged", "bt709", "bt709"), ("tagged", "bt470bg", "bt601")],
)
def test_colours_are_converted_as_asked(color: str, space: str, matrix: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    options = {"g": "12", "colorspace": space, "x264-params": f"colormatrix={space}"}
    data = video_corpus.make(video_corpus.Made("tagged.mkv", "libx264", "matroska", "yuv444p", options=options))
    (tmp_path / "in" / "tagged.mkv").write_bytes(data)
    with pack([tmp_path / "in"], tmp_path / "ds", workers=1) as packed:
        with VideoLoader(packed, 1, clip=Clip(1, start="every"), color=color, shuffle=False, sidecar=None) as loader:  # type: ignore[arg-type]
            found = first(loader)["video"][0, 0].numpy().transpose(1, 2, 0).astype(int)
        with av.open(str(tmp_path / "in" / "tagged.mkv")) as container:
            yuv = next(container.decode(video=0)).to_ndarray(format="yuv444p").astype(float)
    assert np.abs(found - _rgb(yuv, matrix)).max() <= 2
    other = {"bt601": "bt709", "bt709": "bt601"}[matrix]
    assert np.abs(found - _rgb(yuv, other)).max() > 12


def _rgb(yuv: np.ndarray, matrix: str) -> np.ndarray:
    """By the textbook formulas, limited range."""
    red, blue = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}[matrix]
    y, cb, cr = (yuv[0] - 16) / 219, (yuv[1] - 128) / 224, (yuv[2] - 128) / 224
    r, b = y + 2 * (1 - red) * cr, y + 2 * (1 - blue) * cb
    g = (y - red * r - blue * b) / (1 - red - blue)
    return np.clip(np.stack([r, g, b], axis=-1) * 255, 0, 255).round().astype(int)


def test_fast_colours_are_near_the_tagged_ones(make: Any) -> None:
    tagged, fast = (first(make(color=color, size=None, clip=Clip(2)))["video"].int() for color in ("tagged", "fast"))
    difference = (tagged - fast).abs().float()
    assert difference.mean() < 8
    assert difference.max() > 0  # it is another way there


# -- transforms


def test_a_transform_gets_tensors_and_a_generator_that_a_resume_repeats(make: Any) -> None:
    def noisy(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        video = tensors["video"].float()
        return {"video": video + torch.rand(video.shape, generator=generator)}

    options = {"transform": noisy, "clip": Clip(2, per_video=6)}
    whole = [batch["video"] for batch in make(**options)]
    assert whole[0].dtype == torch.float32
    loader = make(**options)
    states = [loader.state_dict() for _ in loader]
    resumed = make(num_threads=1, **options)
    resumed.load_state_dict(states[2])
    assert torch.equal(first(resumed)["video"], whole[3])
    noise = [clip - clip.floor() for clip in whole[0]]
    assert not torch.equal(noise[0], noise[1])


def test_a_transform_may_change_shapes_and_sound_but_not_names(make: Any) -> None:
    def halved(tensors: dict[str, torch.Tensor], _: torch.Generator) -> dict[str, torch.Tensor]:
        return {"video": tensors["video"][..., ::2, ::2], "audio": tensors["audio"].abs()}

    batch = first(make(transform=halved, audio=AudioSpec(8000, seconds=0.5), normalize=((0.5,) * 3, (0.5,) * 3)))
    assert batch["video"].shape == (6, 2, 3, 12, 16)
    assert batch["video"].dtype == torch.float32
    assert batch["audio"].min() >= 0
    with pytest.raises(UsageError, match="dict of the tensors 'video'"):
        first(make(transform=lambda tensors, _: {"picture": tensors["video"]}))
    with pytest.raises(UsageError, match="normalize works on uint8"):
        first(make(transform=lambda tensors, _: {"video": tensors["video"] / 2}, normalize=((0.5,) * 3, (0.5,) * 3)))


def test_what_a_transform_gets_is_its_own_to_keep_and_to_turn(make: Any) -> None:
    kept: list[torch.Tensor] = []

    def turned(tensors: dict[str, torch.Tensor], _: torch.Generator) -> dict[str, torch.Tensor]:
        kept.append(tensors["video"])
        return {"video": tensors["video"].transpose(2, 3)}

    plain = first(make(size=(32, 32)))["video"]
    batch = first(make(size=(32, 32), transform=turned, num_threads=1))["video"]
    assert torch.equal(batch, plain.transpose(3, 4))
    batch.zero_()
    assert all(torch.equal(one, other) for one, other in zip(kept, plain, strict=False))


def test_an_error_of_the_transform_is_raised_as_it_is_and_names_the_sample(make: Any) -> None:
    def broken(tensors: dict[str, torch.Tensor], _: torch.Generator) -> dict[str, torch.Tensor]:
        raise ZeroDivisionError("mine")

    loader = make(transform=broken)
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        first(loader)
    assert "for sample" in raised.value.__notes__[0]
    assert not loader.quarantine


# -- sound


def test_windows_end_to_end_cover_each_recording_once(clips: Dataset) -> None:
    with AudioLoader(clips, 1, window=Window(0.25, start="every"), shuffle=False, sidecar=None) as loader:
        starts: dict[str, list[float]] = {}
        for batch in loader:
            starts.setdefault(batch["key"][0], []).append(float(batch["start"][0]))
            assert batch["audio"].shape == (1, 1, 4000)
    assert set(starts) == {sample.key for sample in clips if sample.audio}
    for sample in clips:
        if sample.audio:
            count = int(sample.audio.samples / sample.audio.sample_rate / 0.25)
            assert starts[sample.key] == [0.25 * n for n in range(count)]


def test_log_mel_windows_are_those_of_the_waveform(clips: Dataset) -> None:
    what = LogMel(n_mels=20)
    options: dict[str, Any] = {"window": 0.5, "seed": 4, "sidecar": None, "num_threads": 2}
    with AudioLoader(clips, 2, **options) as waves, AudioLoader(clips, 2, features=what, **options) as mels:
        from headrace.loaders.audio.mel import log_mel

        for wave, mel in zip(waves, mels, strict=True):
            assert wave["key"] == mel["key"]
            assert torch.equal(wave["start"], mel["start"])
            assert mel["mel"].shape == (2, 1, 20, what.frames(8000))
            expected = torch.stack([log_mel(one, 16_000, what) for one in wave["audio"]])
            assert torch.allclose(mel["mel"], expected, atol=1e-4)


def test_clips_carry_log_mel_too_and_silence_where_there_is_no_sound(make: Any, clips: Dataset) -> None:
    batch = first(make(audio=AudioSpec(8000, 2, 0.5, features=LogMel(n_mels=10))))
    assert batch["mel"].shape == (6, 2, 10, 26)
    for slot, number in enumerate(batch["id"].tolist()):
        assert (batch["audio_samples"][slot] > 0) == (clips.sample(number).audio is not None)
        assert bool((batch["mel"][slot] > -23).any()) == (clips.sample(number).audio is not None)


def test_the_first_channels_are_taken_unmixed_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    left, right = np.full(8000, 0.5, np.float32), np.full(8000, -0.25, np.float32)
    _write_wav(folder / "stereo.wav", np.stack([left, right]))
    with pack([folder], tmp_path / "ds", workers=1) as packed:
        cases: list[tuple[Literal["first", "mix"], int, list[float]]] = [
            ("first", 1, [0.5]),
            ("mix", 1, [0.25 * 0.5**0.5]),
            ("first", 2, [0.5, -0.25]),
        ]
        for policy, channels, expected in cases:
            with AudioLoader(
                packed,
                1,
                window=Window(0.5, start="center"),
                sample_rate=8000,
                channels=channels,
                downmix=policy,
                sidecar=None,
            ) as loader:
                audio = first(loader)["audio"][0]
            assert torch.allclose(audio.mean(1), torch.tensor(expected), atol=2e-3)


def _write_wav(path: Path, samples: np.ndarray) -> None:
    with av.open(str(path), "w") as output:
        stream = output.add_stream("pcm_s16le", rate=8000, layout="stereo")
        interleaved = (samples.T.reshape(1, -1) * 32767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(interleaved, format="s16", layout="stereo")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


@pytest.mark.parametrize(
    "wrong", [{"window": 0.0}, {"window": Window(1.0), "channels": 3}, {"columns": ["audio"]}, {"features": "mfcc"}]
)
def test_impossible_sound_is_refused_at_once(clips: Dataset, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AudioLoader(clips, 1, sidecar=None, **wrong)
    with pytest.raises(UsageError):
        Window(1.0, jitter=0.5)


def test_explain_names_stream_decoder_and_rule(make: Any) -> None:
    explanation = make().explain(0)
    assert "stream 0 of its .mp4, h264" in explanation
    assert "decoder: pyav" in explanation
    assert "the largest" in explanation
    assert "reading: its whole file" in explanation


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"clip": 16}, "clip cannot be 16"),
        ({"audio": 16_000}, "audio cannot be 16000"),
        ({"buckets": [(64, 64)]}, "buckets cannot be"),
        ({"size": 64}, "size cannot be 64"),
        ({"size": (1, 2, 3)}, "not two numbers"),
        ({"normalize": (0.5, 0.5)}, r"normalize=\(0.5, 0.5\) is not"),
        ({"seed": "x"}, "seed cannot be 'x'"),
        ({"seed": None}, "seed cannot be None"),
        ({"shuffle": "no"}, "shuffle cannot be 'no'"),
        ({"rotate": 90}, "rotate cannot be 90"),
        ({"flip_prob": "0.5"}, "flip_prob cannot be '0.5'"),
        ({"device": None}, "device cannot be None"),
        ({"rank": "0", "world_size": 1}, "rank cannot be '0'"),
        ({"batch_size": 2.0}, "batch_size cannot be 2.0"),
        ({"decode_in_subprocess": None}, "decode_in_subprocess cannot be None"),
        ({"max_bad_samples": "1%"}, "max_bad_samples cannot be '1%'"),
        ({"storage_options": "x"}, "storage_options cannot be 'x'"),
        ({"sidecar": 3}, "sidecar cannot be 3"),
        ({"columns": "width"}, "columns cannot be 'width'"),
        ({"on_error": "stop"}, "on_error='stop' is not known"),
        ({"transform": 3}, "transform=3 cannot be called"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_of_another_kind_is_refused_by_name(
    make: Callable[..., VideoLoader], asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        make(**asked)
    assert caught.value.hint


def test_a_dataset_that_lacks_what_is_asked_for_is_named(clips: Dataset) -> None:
    with pytest.raises(UsageError, match=f"{clips.url} has no column 'never'"):
        VideoLoader(Mixture({"a": clips, "b": clips}), 2, columns=["never"])
    with pytest.raises(UsageError, match=r"has no column 'widht' \(did you mean width\?\)"):
        VideoLoader(clips, 2, columns=["widht"])
    with pytest.raises(UsageError, match=f"no sample of {clips.url} is left"):
        VideoLoader(clips.where("duration > 1000000"), 2)


def test_impossible_clips_and_what_is_no_dataset_are_refused() -> None:
    with pytest.raises(UsageError, match="is not a clip"):
        Clip(frames=1 << 20)
    with pytest.raises(UsageError, match="None is not a dataset"):
        VideoLoader(None, 2)  # type: ignore[arg-type]
