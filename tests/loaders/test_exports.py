"""The public surface, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import loaders


def test_the_public_names_are_these() -> None:
    assert loaders.__all__ == [
        "AudioLoader",
        "AudioSpec",
        "Bucket",
        "Buckets",
        "Clip",
        "Durations",
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
        "import sys, threading, loaders, loaders.video\n"
        "assert not [m for m in sys.modules if m.startswith('nvidia')], 'DALI was imported'\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(loaders, "NoSuchThing")
