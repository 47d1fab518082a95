"""Checks the recipe that a user gives.

Invariant: a recipe that passes can be tried on any file.
Failure behaviour: `UsageError` names the option.
"""

from __future__ import annotations

import math

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.media.facts import Recipe

CODECS = ("h264",)
CONTAINERS = ("mp4", "mkv", "webm", "mov")


def check_recipe(recipe: Recipe) -> Recipe:
    """Check the recipe and return it."""
    wrong = {
        f"the codec must be one of {', '.join(CODECS)}": recipe.codec is not None and recipe.codec not in CODECS,
        f"the container must be one of {', '.join(CONTAINERS)}": recipe.container not in (None, *CONTAINERS),
        "WebM cannot hold H.264": recipe.codec == "h264" and recipe.container == "webm",
        "gop must be between 1 and 10,000 frames": not 1 <= recipe.gop <= 10_000,
        "height must be between 16 and 8,192 rows": recipe.height is not None and not 16 <= recipe.height <= 8192,
        "height needs a codec to encode with (--transcode)": recipe.height is not None and recipe.codec is None,
        "split must be at least 0.1 s": recipe.split is not None
        and not (math.isfinite(recipe.split) and recipe.split >= 0.1),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(what, hint="`headrace pack --help` lists what goes together")
    return recipe
