"""The public surface, and what importing it costs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields

import pytest

from headrace import loaders
from headrace.loaders.config import LoaderConfig


def test_the_public_names_are_these() -> None:
    assert loaders.__all__ == [
        "Audio",
        "AudioLoader",
        "AudioSpec",
        "Bucket",
        "Buckets",
        "Bytes",
        "Clip",
        "Durations",
        "Field",
        "FieldInput",
        "FileLoader",
        "Image",
        "Json",
        "Loader",
        "LogMel",
        "Mask",
        "Mixture",
        "Npy",
        "Order",
        "Packing",
        "QuarantineList",
        "Rows",
        "Safetensors",
        "Text",
        "Video",
        "VideoLoader",
        "Window",
        "field_from",
        "planes_to_rgb",
        "register_decoder",
        "register_field",
        "split_planes",
    ]
    assert dir(loaders) == loaders.__all__
    for name in loaders.__all__:
        assert getattr(loaders, name).__name__ == name


def test_importing_starts_nothing_and_imports_no_decoder() -> None:
    code = (
        "import sys, threading, headrace.loaders.video_loader\n"
        "assert not [m for m in sys.modules if m.startswith('nvidia')], 'DALI was imported'\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(loaders, "NoSuchThing")


@pytest.mark.parametrize("kind", [loaders.VideoLoader, loaders.AudioLoader, loaders.FileLoader])
def test_every_argument_of_a_loader_is_shown_and_documented_once(kind: type) -> None:
    shown = inspect.signature(kind).parameters
    documented = re.findall(r"^    (\w+) \(.*\): ", vars(kind)["__init__"].__doc__ or "", re.M)
    assert sorted(documented) == sorted(shown)
    assert {field.name for field in fields(LoaderConfig)} < set(shown)


def test_help_shows_every_argument_of_a_loader_with_its_default() -> None:
    shown = inspect.signature(loaders.VideoLoader).parameters
    assert shown["crop"].default == "center"
    assert shown["prefetch_batches"].default == 2
    assert list(shown)[:3] == ["url_or_dataset", "batch_size", "clip"]
    assert "self" not in shown


@pytest.mark.parametrize("kind", [loaders.VideoLoader, loaders.AudioLoader])
def test_an_argument_that_there_is_not_is_named(kind: type) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) has no argument 'colour'"):
        kind("nowhere", 8, colour="red")


def test_a_mistyped_argument_of_a_description_is_an_error_that_names_the_right_one() -> None:
    cases: list[tuple[Callable[..., object], str, str]] = [
        (loaders.Clip, "frame", "frames"),
        (loaders.Clip, "num_frames", "frames"),
        (loaders.AudioSpec, "samplerate", "sample_rate"),
        (loaders.LogMel, "nmels", "n_mels"),
        (loaders.Mixture, "weight", "weights"),
        (loaders.Packing, "lookahed", "lookahead"),
    ]
    for kind, argument, meant in cases:
        with pytest.raises(TypeError) as caught:
            kind(**{argument: 1})
        assert str(caught.value) == f"{kind.__name__}() has no argument {argument!r} (did you mean {meant}?)"


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (loaders.VideoLoader, "num_workers", "(did you mean num_threads?)"),
        (loaders.VideoLoader, "frames", "(did you mean clip=Clip(frames=...)?)"),
        (loaders.AudioLoader, "frames", "'frames'"),
        (loaders.AudioLoader, "seconds", "(did you mean window=Window(seconds)?)"),
        (loaders.VideoLoader, "colour", "(did you mean color?)"),
        (loaders.VideoLoader, "zzz", "'zzz'"),
        (loaders.Loader, "num_workers", "(did you mean num_threads?)"),
        (loaders.Loader, "prefetch_factor", "(did you mean prefetch_batches?)"),
        (loaders.Loader, "shuffle_buffer", "; shuffle=True shuffles the whole dataset without a buffer"),
        (loaders.Loader, "pin_memory", 'device="pinned" requires it, and device="cuda" copies them'),
        (loaders.Loader, "collate_fn", "transform= changes each sample, and Loader has collate= for its entries"),
        (loaders.AudioLoader, "worker_init_fn", "it is called in num_threads= threads"),
        (loaders.FileLoader, "sampler", "the weights of a Mixture or a view of Dataset.where choose samples"),
        (loaders.FileLoader, "batch_sampler", "buckets= of Loader make batches of one shape"),
        (loaders.VideoLoader, "persistent_workers", "the threads of num_threads= stay between epochs"),
    ],
)
def test_an_argument_of_other_libraries_is_an_error_that_names_ours(kind: type, name: str, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind("nowhere", 4, **{name: 1})
    assert str(caught.value).endswith(hint)
