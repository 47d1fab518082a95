"""The saves of a checkpointer at the end of its program."""

from __future__ import annotations

import logging

import pytest

from checkpoint.saves import warn_of_python
from dataio.core import log


@pytest.mark.parametrize("version", [(3, 12, 0), (3, 12, 2)])
def test_a_python_that_starts_no_thread_at_its_end_is_named_with_what_to_do(
    version: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    log._said.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_python(version)
    assert f"Python {'.'.join(map(str, version))} loses a save" in caplog.text
    assert "3.12.3 or newer" in caplog.text


@pytest.mark.parametrize("version", [(3, 11, 7), (3, 12, 3), (3, 13, 0)])
def test_the_others_are_not_spoken_of(version: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    log._said.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_python(version)
    assert not caplog.text
