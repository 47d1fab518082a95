"""A copy of a run as a process of its own: `checkpoint_copier SOURCE DESTINATION`."""

from __future__ import annotations

import sys

from headrace.checkpoint.copies.copy import copy
from tests.support.checkpoint_states import RUN


def main(source: str, destination: str) -> None:
    copy(source, destination, run=RUN, tags=True, workers=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
