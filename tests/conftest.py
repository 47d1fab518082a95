"""What every room's tests share: real media, and a real S3 server on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

_MEDIA = Path(__file__).resolve().parents[2] / "shared" / "media"


@pytest.fixture(scope="session")
def media() -> Path:
    """The folder of real clips beside a development checkout."""
    if not _MEDIA.is_dir():
        pytest.skip("no folder of real clips beside this checkout (../shared/media)")
    return _MEDIA
