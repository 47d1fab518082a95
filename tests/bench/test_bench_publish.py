"""`headrace bench publish` and `headrace bench exchange`: all candidates run, and deliver the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.workloads import exchange, publish, publish_adamw


@pytest.mark.parametrize("name", [publish.HEADRACE, publish.BY_NUMBER, publish.SAFETENSORS])
def test_every_candidate_delivers_the_new_weights(name: str, tmp_path: Path) -> None:
    figures = publish.measure(name, str(tmp_path / "candidate"), 16, 0.02)
    assert 0 < figures["published"] <= (1 if name == publish.SAFETENSORS else 0.025)
    assert set(figures) <= set(publish.METRICS)


def test_weights_after_a_step_of_adamw_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 64, "LAYERS": 1, "CONTEXT": 16, "BATCH": 1, "WARM_UP": 2}.items():
        monkeypatch.setattr(publish_adamw, name, value)
    figures = publish_adamw.measure(1e-5, str(tmp_path / "candidate"))
    assert set(figures) == set(publish_adamw.METRICS)
    assert 0 < figures["changed"] < 1
    assert figures["sparse"] + figures["xor"] + figures["whole"] <= figures["published"]


def test_exchanged_steps_have_their_bytes(tmp_path: Path) -> None:
    exchange.make(str(tmp_path), 16)
    for name in filter(exchange.is_installed, exchange.NAMES):
        figures = exchange.measure(name, str(tmp_path))
        assert figures["mb_per_s"] * figures["wall_s"] >= 16 * 1.04
        assert set(figures) == set(exchange.METRICS)
