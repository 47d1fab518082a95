"""A trainer that reads batches until a signal ends it, a program of the nursery: `main(URL, "here" | "isolated")`.

It prints `batch` for each of them.
"""

from __future__ import annotations

from headrace.loaders import Clip, VideoLoader


def main(url: str, kind: str) -> None:
    options = {"clip": Clip(3, per_video=5), "size": (24, 32), "num_threads": 2, "sidecar": None}
    with VideoLoader(url, 2, decode_in_subprocess=kind == "isolated", **options) as loader:  # type: ignore[arg-type]
        while True:
            for _ in loader:
                print("batch", flush=True)
