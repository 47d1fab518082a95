"""Resampling: from one rate and layout to another, in one call."""

from __future__ import annotations

import numpy as np
import pytest

from loaders import AudioSpec
from loaders.sound import resample


def test_resampling_does_not_depend_on_how_much_is_handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(2).standard_normal((2, 100_000), np.float32)
    whole = resample.resampled(source, 44_100, "stereo", AudioSpec())
    for count in (1 << 20, 4097):
        monkeypatch.setattr(resample, "AT_ONCE", count)
        monkeypatch.setattr(resample, "_LONGEST", 3 * count + 1)
        assert np.array_equal(whole, resample.resampled(source, 44_100, "stereo", AudioSpec()))
    assert resample.resampled(source, 16_000, "stereo", AudioSpec(channels=2)) is source
