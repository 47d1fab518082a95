"""A trainer's save without torch, as a process of its own: `saver.py URL STEP SEED PARENT`; PARENT is empty or a Base as JSON."""

from __future__ import annotations

import sys

import msgspec

from headrace.checkpoint.format import description
from headrace.checkpoint.format.documents import Base
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import begin, make, save, tiny_state


def main(url: str, step: str, seed: str, parent: str) -> None:
    base = msgspec.json.decode(parent, type=Base) if parent else None
    with open_store(url) as store:
        number = begin(store, base)
        data = description.encode({"config": {"seed": int(seed)}})
        made = make(
            store,
            tiny_state(int(seed)),
            step=int(step),
            number=number,
            bases=(base,) if base else (),
            metadata={"seed": int(seed), "loss": float("inf")},
            description=description.name_of(data),
            description_data=data,
        )
        save(store, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
