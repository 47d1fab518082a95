"""The demo's settings, as plain numbers. The command line reads them before it imports any large package."""

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
