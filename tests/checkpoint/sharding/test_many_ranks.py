"""64 real processes save through a store that takes 20 ms, and 48 restore. `make soak` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sixty_four_ranks_save_and_forty_eight_restore(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.many_ranks", str(tmp_path), "64", "48"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=850)
    first, later, restored = map(json.loads, done.stdout.splitlines())
    print(done.stdout)
    assert (first["ranks"], later["ranks"], restored["ranks"]) == (64, 64, 48)
    assert restored["requests"] <= 20 * 64
