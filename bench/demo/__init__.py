"""The demo: pack, train, kill, resume and compare, on a local S3 server. `Settings` has the numbers of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The numbers that define a run of the demo. `kill_at` is a step that is saved and is not the last one."""

    steps: int = 48
    save_every: int = 12
    kill_at: int = 24
    batch_size: int = 8
    clips_per_video: int = 16
