"""The program that measures large indexes: the figures of design note 0037, on a small index."""

from __future__ import annotations

import json

import pytest

from tests.support import index_scale


def test_a_large_index_is_opened_by_its_document_and_a_column_costs_its_own_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    index_scale.main(["--samples", "400000", "--column-parts", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["open"]["requests"] == 1
    assert found["open"]["bytes"] == found["document_bytes"] < 5_000
    assert found["column_frames"]["samples"] == 100_000
    assert found["column_frames"]["requests"] <= 4
    assert found["column_frames"]["ratio"] < 1.1
    assert found["ids_of_all_bytes"] == 0
    assert found["where_half_bytes_per_sample"] < 0.126
