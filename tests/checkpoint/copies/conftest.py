"""Actors that a search left in the middle end with its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stepping import end_all


@pytest.fixture(autouse=True)
def _actors_end() -> Iterator[None]:
    yield
    end_all()
