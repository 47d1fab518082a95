"""The limits of the machine are measured, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.core import machine


def test_limits_are_rates_of_this_machine_and_say_how_they_were_measured(tmp_path: Path) -> None:
    copy = machine.copy_rate(8 << 20)
    assert 1e8 < copy.rate < 1e12
    for measure in (machine.write_rate, machine.read_rate):
        found = measure(tmp_path, 32 << 20)
        assert 1e6 < found.rate < 1e12
        assert "same run" in found.why
    assert not list(tmp_path.iterdir())


def test_without_o_direct_the_page_cache_is_used_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.os.open

    def refuse(path: Path, flags: int, mode: int = 0o600) -> int:
        if flags & machine.os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(machine.os, "open", refuse)
    assert "(through the page cache)" in machine.write_rate(tmp_path, 16 << 20).why
