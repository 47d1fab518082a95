"""Publishes step STEP of the run "exp42" at URL as `policy`: `publishing_process URL STEP`. A test kills it at a crash point."""

from __future__ import annotations

import sys

from headrace.checkpoint.publishing.publisher import publish
from headrace.checkpoint.publishing.source import Choice
from headrace.checkpoint.repository import steps
from headrace.dataio.store.open import open_store


def main(url: str, step: str) -> None:
    with open_store(url) as store:
        base = steps.find(store, "exp42", int(step))
        assert base is not None
        publish(store, "policy", "exp42", base, Choice(("model/*",)))


if __name__ == "__main__":
    main(*sys.argv[1:])
