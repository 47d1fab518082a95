"""Convert raw planes to RGB with torch, on the CPU or a GPU.

Purpose: `Video(pixel_format=...)` delivers luma and chroma. `planes_to_rgb` makes of them what `color="tagged"` delivers.
Invariants: pure functions of torch tensors without synchronization with the host, so `torch.compile` captures them in
one graph. Clips at their own size differ from `color="tagged"` by at most 1 of 255, for colours in the range that their
matrix allows.
Failure behaviour: `UsageError` for tensors of another shape or dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.dataio.core.errors import UsageError
from headrace.loaders.decode.base import PixelFormat
from headrace.loaders.validation import check_choice

PLANES: tuple[PixelFormat, ...] = ("yuv420p", "nv12", "yuv420p10")
"""The formats of planes."""
_BT601 = 0.299, 0.114
_WEIGHTS = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593)}
"""The weights of red and blue in luma, by the matrix's code point in ITU-T H.273. All others are BT.601."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def split_planes(planes: torch.Tensor, pixel_format: PixelFormat = "yuv420p") -> tuple[torch.Tensor, torch.Tensor]:
    """Return luma and chroma as views of raw planes.

    Args:
        planes (torch.Tensor): uint8 or, for "yuv420p10", uint16 (..., H * 3 / 2, W), as `Video(pixel_format=...)`
            delivers it.
        pixel_format (str): "yuv420p", "nv12" or "yuv420p10". Default: "yuv420p".

    Returns:
        tuple[torch.Tensor, torch.Tensor]: luma (..., H, W), and chroma (..., 2, H / 2, W / 2), where Cb is before Cr.

    Raises:
        UsageError: for tensors of another shape or dtype.

    Example:
        >>> import torch
        >>> luma, chroma = split_planes(torch.zeros(2, 4, 48, 64, dtype=torch.uint8))
        >>> luma.shape, chroma.shape
        (torch.Size([2, 4, 32, 64]), torch.Size([2, 4, 2, 16, 32]))
    """
    check_choice("pixel_format", pixel_format, PLANES)
    dtype = torch.uint16 if pixel_format == "yuv420p10" else torch.uint8
    if planes.ndim < 2 or planes.shape[-2] % 3 or planes.shape[-1] % 2 or planes.dtype != dtype:
        raise UsageError(
            f"planes of {tuple(planes.shape)}, {planes.dtype} are not {pixel_format}",
            hint=f"{dtype} (..., H * 3 / 2, W), with even H and W",
        )
    height, width = planes.shape[-2] * 2 // 3, planes.shape[-1]
    luma, chroma, others = planes[..., :height, :], planes[..., height:, :], planes.shape[:-2]
    if pixel_format == "nv12":
        return luma, chroma.reshape(*others, height // 2, width // 2, 2).movedim(-1, -3)
    return luma, chroma.reshape(*others, 2, height // 2, width // 2)


def planes_to_rgb(
    planes: torch.Tensor,
    color: torch.Tensor,
    pixel_format: PixelFormat = "yuv420p",
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Convert raw planes to RGB.

    Chroma is interpolated bilinearly, as libswscale does for `color="tagged"`.

    Args:
        planes (torch.Tensor): uint8 or, for "yuv420p10", uint16 (..., H * 3 / 2, W), as `Video(pixel_format=...)`
            delivers it.
        color (torch.Tensor): the entry `<name>.color`, int64 (..., 2): the matrix and the range of each clip. Its first
            axes are the first axes of `planes`: (B, 2) for planes (B, T, H * 3 / 2, W), or (2,) for one clip.
        pixel_format (str): "yuv420p", "nv12" or "yuv420p10". Default: "yuv420p".
        dtype (torch.dtype): float32, float16 or bfloat16 for values in 0 to 1, or uint8 for 0 to 255. Values are
            computed in float32. Default: torch.float32.

    Returns:
        torch.Tensor: (..., 3, H, W), on the device of `planes`.

    Raises:
        UsageError: for tensors of another shape or dtype.

    Example:
        >>> fields = {"video": Video(Clip(frames=4), size=(32, 48), pixel_format="nv12")}
        >>> loader = Loader(clips, batch_size=2, fields=fields)
        >>> batch = next(iter(loader))
        >>> batch["video"].shape
        torch.Size([2, 4, 48, 48])
        >>> planes_to_rgb(batch["video"], batch["video.color"], "nv12").shape
        torch.Size([2, 4, 3, 32, 48])
        >>> loader.close()
    """
    luma, chroma = split_planes(planes, pixel_format)
    if dtype not in _DTYPES:
        raise UsageError(f"planes_to_rgb makes no {dtype}", hint=f"use {', '.join(map(str, _DTYPES))}")
    axes = color.ndim - 1
    if axes < 0 or axes > planes.ndim - 2 or color.shape != (*planes.shape[:axes], 2):
        raise UsageError(
            f"color of {tuple(color.shape)} does not go with planes of {tuple(planes.shape)}",
            hint="color is (B, 2) for planes (B, T, H * 3 / 2, W), or (2,) for one clip",
        )
    matrix, is_full = color.to(planes.device).reshape(*color.shape, *[1] * (planes.ndim - axes)).unbind(axes)
    is_full = is_full != 0
    red, blue = (torch.full_like(matrix, weight, dtype=torch.float32) for weight in _BT601)
    for code, (of_red, of_blue) in _WEIGHTS.items():
        is_this = matrix == code
        red, blue = torch.where(is_this, of_red, red), torch.where(is_this, of_blue, blue)
    bits = 10 if pixel_format == "yuv420p10" else 8
    unit, full = 1 << (bits - 8), float((1 << bits) - 1)
    black = torch.where(is_full, 0.0, 16.0 * unit)
    light = (luma.to(torch.float32) - black) / torch.where(is_full, full, 219.0 * unit)
    size = (luma.shape[-2], luma.shape[-1])
    pairs = chroma.to(torch.float32).reshape(-1, *chroma.shape[-3:])
    wide = F.interpolate(pairs, size, mode="bilinear").reshape(*chroma.shape[:-2], *size)
    cb, cr = ((wide - 128.0 * unit) / torch.where(is_full, full, 224.0 * unit).unsqueeze(-3)).unbind(-3)
    more_red, more_blue = cr * (2 - 2 * red), cb * (2 - 2 * blue)
    more_green = -(red * more_red + blue * more_blue) / (1 - red - blue)
    rgb = torch.stack((light + more_red, light + more_green, light + more_blue), -3).clamp_(0, 1)
    return (rgb * 255).round_().to(dtype) if dtype == torch.uint8 else rgb.to(dtype)
