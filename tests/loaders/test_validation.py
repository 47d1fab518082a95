"""What loaders are described by is of the kinds that the annotations say, also where it comes from a file or from numpy."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import (
    AudioLoader,
    AudioSpec,
    Bucket,
    Buckets,
    Clip,
    Durations,
    LogMel,
    Mixture,
    Packing,
    VideoLoader,
    Window,
)
from headrace.loaders.validation import checked

ONE = Bucket((64, 64))
WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (Clip, ("16",), {}, "Clip's frames cannot be '16'"),
    (Clip, (16.0,), {}, "Clip's frames cannot be 16.0"),
    (Clip, (16,), {"fps": "8"}, "Clip's fps cannot be '8'"),
    (Clip, (16,), {"start": "end"}, "Clip's start cannot be 'end'"),
    (Clip, (16,), {"start": "center", "jitter": "1"}, "Clip's jitter cannot be '1'"),
    (Window, ("2",), {}, "Window's seconds cannot be '2'"),
    (Window, (2,), {"per_sample": 1.5}, "Window's per_sample cannot be 1.5"),
    (Window, (2,), {"start": "center", "jitter": float("nan")}, "jitter"),
    (LogMel, (80.0,), {}, "LogMel's n_mels cannot be 80.0"),
    (LogMel, (), {"f_min": float("nan")}, "no bands"),
    (AudioSpec, ("16k",), {}, "AudioSpec's sample_rate cannot be '16k'"),
    (Packing, (30.5,), {}, "Packing's capacity cannot be 30.5"),
    (Packing, (30,), {"repack_each_epoch": "yes"}, "Packing's repack_each_epoch cannot be 'yes'"),
    (Bucket, ((256,),), {}, r"Bucket's size cannot be \(256,\)"),
    (Bucket, (256,), {}, "Bucket's size cannot be 256"),
    (Buckets, ([(64, 64)],), {"budget": 10**9}, "Buckets's buckets cannot be"),
    (Buckets, ((ONE,),), {"budget": "1e9"}, "Buckets's budget cannot be '1e9'"),
    (Buckets, ((ONE,),), {"budget": 10**9, "patch": (1, 2)}, "Buckets's patch cannot be"),
    (Durations, (2,), {"budget": 600}, "Durations's seconds cannot be 2"),
    (Durations, ((2, 5),), {"budget": float("inf")}, "the budget of inf"),
    (Mixture, ({"a": "ds"},), {"weights": {"a": "x"}}, "weights cannot be {'a': 'x'}"),
    (Mixture, ({"a": "ds"},), {"weights": [1]}, r"weights cannot be \[1\]"),
    (Mixture, ({"a": "ds"},), {"weights": {}}, "differ in 'a'"),
    (Mixture, ({"a": "ds"},), {"temperature": 0}, "temperature"),
    (Mixture, ({"a": "ds"},), {"temperature": "2"}, "temperature cannot be '2'"),
    (Mixture, ({"a": "ds"},), {"epoch_batches": 2.5}, "epoch_batches cannot be 2.5"),
]


@pytest.mark.parametrize(("kind", "given", "named", "reason"), WRONG, ids=[f"{w[0].__name__}{w[1:3]}" for w in WRONG])
def test_values_of_another_type_are_refused_by_the_description(
    kind: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        kind(*given, **named)
    assert caught.value.hint


def test_whole_numbers_stand_for_floats_and_stay_whole() -> None:
    assert (Clip(8, fps=8).fps, Window(2).seconds) == (8, 2)
    fps: object = Clip(8, fps=8).fps
    assert type(fps) is int  # as in states that were saved before
    assert Bucket([64, 48]) == Bucket((64, 48))  # type: ignore[arg-type]


def test_numpys_numbers_become_plain_ones_and_a_state_of_them_is_json(made_dataset: Dataset) -> None:
    clip: Any = Clip(np.int64(2), np.int32(2), start="center", per_video=np.int16(2))  # type: ignore[arg-type]
    size, seed, batch = tuple(np.array([16, 24])), np.uint32(7), np.int64(2)
    more: dict[str, Any] = {"shuffle": np.bool_(True), "device": torch.device("cpu"), "sidecar": None, "num_threads": 1}
    plain = VideoLoader(made_dataset, 2, clip=Clip(2, 2, start="center", per_video=2), size=(16, 24), seed=7, **more)
    numpys = VideoLoader(made_dataset, batch, clip=clip, size=size, seed=seed, **more)  # type: ignore[arg-type]
    with plain, numpys:
        assert next(iter(numpys))["key"] == next(iter(plain))["key"]
        assert json.dumps(numpys.state_dict()) == json.dumps(plain.state_dict())
    packing, rate = Packing(np.int64(16_000)), np.int64(8_000)  # type: ignore[arg-type]
    with AudioLoader(made_dataset, 1, packing=packing, sample_rate=rate, sidecar=None) as packed:  # type: ignore[arg-type]
        json.dumps(packed.state_dict())
    with AudioLoader(made_dataset, 1, window=np.float32(0.5), sidecar=None) as windows:  # type: ignore[arg-type]
        json.dumps(windows.state_dict())


def test_a_mapping_of_a_configuration_is_as_good_as_a_dict() -> None:
    assert checked("weights", UserDict(a=1, b=np.float32(2)), dict[str, float]) == {"a": 1, "b": 2.0}


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_a_seed_that_no_state_could_hold_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match="64 bits"):
        VideoLoader("nowhere", 4, seed=seed)


def test_the_error_names_the_expected_type_in_words() -> None:
    for make, words in (
        (lambda: AudioSpec(features="mel"), "give 'waveform' or LogMel"),  # type: ignore[arg-type]
        (lambda: AudioSpec(seconds="2"), "give float or None"),  # type: ignore[arg-type]
        (lambda: Mixture({"a": "ds"}, weights=[1]), "a list of (step, dict)"),  # type: ignore[list-item]
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert words in caught.value.hint
