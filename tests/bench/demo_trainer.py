"""The demo's trainer as a program of the nursery."""

from __future__ import annotations

from headrace.bench.demo import trainer


def main(*arguments: str) -> int:
    return trainer.main(list(arguments))
