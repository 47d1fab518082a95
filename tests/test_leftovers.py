"""What tests leave behind is found, and what is just ending is no reason to fail."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import leftovers


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[leftovers.Place]:
    """A temporary folder of this test, in the place of this process's."""
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path))
    monkeypatch.setattr(leftovers, "_SECONDS", 0.0)
    made = leftovers.Place()
    yield made
    made.close()


def test_a_file_a_thread_and_a_process_are_named(place: leftovers.Place) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, args=(60,), name="left-over")
    thread.start()
    program = "print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n"  # a moment before that it has no name yet
    (place._scratch.path / "left.over").touch()
    found = place.left()
    go.set()
    thread.join()
    child.communicate(b"\n")
    assert [line for line in found if "left.over" in line]
    assert "thread left-over" in found
    assert [line for line in found if line.startswith(f"process {child.pid}: ")]
    (place._scratch.path / "left.over").unlink()
    assert not [line for line in place.left() if "left" in line or f" {child.pid}:" in line]


def test_a_thread_that_ends_while_it_is_looked_at_is_none(
    place: leftovers.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([Path("/proc/self/task/0")]))
    assert not [line for line in place.left() if line.startswith("process")]
