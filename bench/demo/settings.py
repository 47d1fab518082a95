"""What the demo does, as plain numbers: read by the command line before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the demo does. `kill_at` is a step that is saved and not the last one."""

    steps: int = 48
    save_every: int = 12
    kill_at: int = 24
    batch_size: int = 8
    clips_per_video: int = 16
