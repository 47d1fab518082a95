"""A collector as a process: `collector.py URL STEP ...` removes those steps of timeline 1."""

from __future__ import annotations

import sys

from headrace.checkpoint.format.documents import StepOfRun
from headrace.checkpoint.repository.collect import collect
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN


def main(url: str, *steps: str) -> None:
    with open_store(url) as store:
        collect(store, [StepOfRun(RUN, 1, int(step)) for step in steps])


if __name__ == "__main__":
    main(*sys.argv[1:])
