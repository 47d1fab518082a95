"""A small video model for the demo: reconstructs a clip of which random patches of space and time were hidden.

Invariant: everything random (hiding, dropout) comes from torch's global generators, so that a run is repeated bit for bit
only if a checkpoint restores those generators too: the demo's proof leans on it.
Failure behaviour: none of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _down(channels_in: int, channels_out: int, stride: tuple[int, int, int]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1),
        nn.GroupNorm(8, channels_out),
        nn.SiLU(),
    )


def _up(channels_in: int, channels_out: int, scale: tuple[float, float, float]) -> nn.Sequential:
    return nn.Sequential(
        nn.Upsample(scale_factor=scale),
        nn.Conv3d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.GroupNorm(8, channels_out),
        nn.SiLU(),
    )


class MaskedClipModel(nn.Module):
    """Masked autoencoder over clips, about 0.4 million parameters.

    `forward` takes uint8 video (B, T, 3, H, W) with T divisible by 4 and H, W by 8 and returns the mean absolute error
    of the reconstruction, a float32 scalar.
    """

    def __init__(self, hidden_share: float = 0.5) -> None:
        super().__init__()
        self.hidden_share = hidden_share
        self.encoder = nn.Sequential(
            _down(3, 24, (1, 2, 2)), _down(24, 48, (2, 2, 2)), _down(48, 96, (2, 2, 2)), nn.Dropout3d(0.1)
        )
        self.decoder = nn.Sequential(_up(96, 64, (2.0, 2.0, 2.0)), _up(64, 32, (2.0, 2.0, 2.0)))
        self.head = nn.Conv3d(32, 3 * 4, kernel_size=3, padding=1)  # four colours a place: a 2x2 patch of pixels

    def forward(self, video: Tensor) -> Tensor:
        clip = video.transpose(1, 2).float().div(255.0).sub(0.5)
        batch, _, frames, height, width = clip.shape
        keep = torch.rand(batch, 1, frames // 2, height // 8, width // 8, device=clip.device) >= self.hidden_share
        mask = keep.float().repeat_interleave(2, 2).repeat_interleave(8, 3).repeat_interleave(8, 4)
        patches = self.head(self.decoder(self.encoder(clip * mask)))
        restored = nn.functional.pixel_shuffle(patches.transpose(1, 2), 2).transpose(1, 2)
        error: Tensor = (restored - clip).abs().mean()
        return error
