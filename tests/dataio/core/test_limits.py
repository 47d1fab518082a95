"""Sizes that people write."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.dataio.core import limits
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("4MiB", 4 << 20),
        ("256M", 256 << 20),
        ("1.5GB", 1_500_000_000),
        (" 2 kb ", 2000),
        ("1t", 1 << 40),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e6", "4 parsecs", "4MiBs", "1,5GB", "nan"])
def test_what_is_no_size_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_is_near_the_size(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_free_memory_is_what_is_left_under_the_limit_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/jobs/7\n")
    whole = limits.free_memory()
    cache = f"anon {60 * MIB}\nactive_file {MIB}\ninactive_file {2 * MIB}\nslab_reclaimable {MIB}\n"
    no_swap = {"swap.current": "0\n", "swap.max": "0\n"}
    group(tmp_path / "jobs" / "7", max=f"{100 * MIB}\n", current=f"{70 * MIB}\n", stat=cache, **no_swap)
    assert limits.free_memory() == 34 * MIB
    group(tmp_path / "jobs", max=f"{80 * MIB}\n", current=f"{79 * MIB}\n", stat=cache, **no_swap)
    assert limits.free_memory() == 5 * MIB
    group(tmp_path / "jobs", current=f"{90 * MIB}\n")
    assert limits.free_memory() == 0
    for folder in (tmp_path / "jobs", tmp_path / "jobs" / "7"):
        group(folder, max="max\n")
    assert limits.free_memory() > 34 * MIB or whole <= 34 * MIB
