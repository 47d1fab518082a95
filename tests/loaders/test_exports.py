"""The public surface, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from headrace import loaders
from headrace.loaders.common import Asked, Common


def test_the_public_names_are_these() -> None:
    assert loaders.__all__ == [
        "AudioLoader",
        "AudioSpec",
        "Bucket",
        "Buckets",
        "Clip",
        "Durations",
        "FileLoader",
        "LogMel",
        "Mixture",
        "Order",
        "Packing",
        "QuarantineList",
        "VideoLoader",
        "Window",
    ]
    assert dir(loaders) == loaders.__all__
    for name in loaders.__all__:
        assert getattr(loaders, name).__name__ == name


def test_importing_starts_nothing_and_imports_no_decoder() -> None:
    code = (
        "import sys, threading, loaders, headrace.loaders.video_loader\n"
        "assert not [m for m in sys.modules if m.startswith('nvidia')], 'DALI was imported'\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(loaders, "NoSuchThing")


def test_what_every_loader_may_be_asked_for_has_the_same_types_for_checkers_and_at_run_time() -> None:
    assert Common.__annotations__.keys() == {field.name for field in fields(Asked)}
    told = {name: reference.__forward_arg__ for name, reference in Common.__annotations__.items()}
    assert told == {field.name: field.type for field in fields(Asked)}


def test_help_shows_every_argument_of_a_loader_with_its_default() -> None:
    shown = inspect.signature(loaders.VideoLoader).parameters
    assert shown["crop"].default == "center"
    assert shown["prefetch"].default == 2
    assert "common" not in shown


@pytest.mark.parametrize("kind", [loaders.VideoLoader, loaders.AudioLoader])
def test_an_argument_that_there_is_not_is_named(kind: type) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) has no argument 'colour'"):
        kind("nowhere", 8, colour="red")


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        (loaders.VideoLoader, "num_workers", "(did you mean threads?)"),
        (loaders.VideoLoader, "frames", "(did you mean clip=Clip(frames=...)?)"),
        (loaders.AudioLoader, "frames", "'frames'"),
        (loaders.AudioLoader, "seconds", "(did you mean window=Window(seconds)?)"),
        (loaders.VideoLoader, "colour", "(did you mean color?)"),
        (loaders.VideoLoader, "zzz", "'zzz'"),
    ],
)
def test_an_argument_that_others_have_is_told_by_our_name(kind: type, name: str, told: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind("nowhere", 4, **{name: 1})
    assert str(caught.value).endswith(told)
