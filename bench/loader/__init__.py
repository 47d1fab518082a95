"""`headrace bench loader`: one epoch of decoded clips, beside other loaders, from the same clips.

Start with `cli` (what is compared), then `candidates` (how each does it); `data` makes the clips, `by_hand` decodes as people do.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """`headrace bench loader`."""
    from headrace.bench.loader import cli

    return cli.main(argv)
