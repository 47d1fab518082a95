"""What a cache fetches of films of which each clip reads the head and a place far behind it: simulated epochs.

Twelve films of 134 MiB, four clips of each an epoch: 400 KiB at the beginning and two to four pieces of 256 KiB anywhere, in
shards of one film each. `pytest tests/bench/test_cache_films.py -s` prints bytes from the store by bytes that were read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from headrace.dataio.cache.plan import CachePlan, files, pinned
from headrace.dataio.cache.plan.events import ObjectId, Want
from tests.bench.test_cache_epochs import Node

pytestmark = pytest.mark.slow

MIB = 1 << 20
FILM, FILMS, CLIPS, PIECE, HEAD = 134 * MIB, 12, 4, MIB // 4, 400 << 10
EPOCHS = 40


def clips(seed: int) -> list[Want]:
    draw, out = random.Random(seed), list[Want]()
    for film in range(FILMS):
        for _ in range(CLIPS):
            count = draw.randint(2, 4)
            place = 512 + PIECE * draw.randint(2, FILM // PIECE - count - 1)
            ranges = ((512, HEAD), (place, count * PIECE), (FILM, 0))
            out.append(Want(ObjectId("s", f"{film}.tar", FILM, 0.0), ranges))
    draw.shuffle(out)
    return out


def sent(budget: int) -> Iterator[tuple[int, int]]:
    """Bytes from the store and bytes read, of each epoch."""
    node = Node(CachePlan(budget, prefetch_parts=8), 1)
    node.do(node.plan.reads_in_order(1, "s"))
    for epoch in range(EPOCHS):
        before, coming = node.fetched, clips(epoch)
        for at in range(0, len(coming), 4):
            for want in coming[at : at + 4]:
                node.read(0, want)
            node.do(node.plan.announce(1, "s", coming[at + 4 : at + 36]))
        yield node.fetched - before, sum(size for want in coming for _, size in want.ranges)
    assert not node.bypassed


@pytest.mark.parametrize("budget", [64 * MIB, 1024 * MIB, 4096 * MIB])
def test_of_films_no_more_comes_than_is_read(budget: int) -> None:
    shares = [fetched / asked for fetched, asked in sent(budget)]
    print([round(share, 2) for share in shares[:8]], round(sum(shares), 1))
    assert max(shares[:4]) <= 1.0


def test_in_many_epochs_no_more_comes_than_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [fetched for fetched, _ in sent(4096 * MIB)]
    for module in (files, pinned):
        monkeypatch.setattr(module, "is_part", lambda _: False)
    blocks = list(sent(4096 * MIB))
    print([round(fetched / asked, 2) for fetched, asked in blocks[:8]])
    assert all(sum(parts[:number]) <= sum(fetched for fetched, _ in blocks[:number]) for number in range(EPOCHS))
    assert blocks[0][0] > 4 * blocks[0][1], "or it would be no matter"
