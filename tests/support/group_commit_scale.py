"""Measures the commit of a large job in virtual time: `python -m tests.support.group_commit_scale RANKS`.

All ranks run the real code, with a tiny state and groups of a hundred. The store answers after 20 ms. The ranks end their
uploads within two seconds. CPU time does not count as virtual time.
"""

from __future__ import annotations

import json
import random
import sys
from unittest import mock

from headrace.checkpoint.format import group, names
from headrace.checkpoint.format.chunking import TensorSpec
from tests.checkpoint.repository import test_group_commit as jobs

GROUP_RANKS = 100


def measure(ranks: int) -> dict[str, float]:
    """Requests a rank without packs, and seconds from the last manifest until COMMIT and until the last rank has seen it."""
    draw = random.Random(1)
    begins = [draw.uniform(0, 2) for _ in range(ranks)]
    with mock.patch.object(names, "GROUP_RANKS", GROUP_RANKS), mock.patch.object(jobs, "WORLD", ranks):
        shares = [group.share_digest([TensorSpec("w", "uint8", jobs.share(r)[1], True)]) for r in range(ranks)]
        with mock.patch.object(jobs, "PLAN", group.plan_digest(shares)):
            job = jobs.Job()
            job.save(ranks=range(ranks), delay=begins.__getitem__)
    stored = [(at, key) for at, _, operation, key in job.sent if operation == "PUT"]
    last = max(at for at, key in stored if key.endswith(".manifest"))
    committed = min(at for at, key in stored if key.endswith("/COMMIT"))
    requests = job.count() - job.count("packs/", "PUT")
    return {
        "ranks": ranks,
        "requests_per_rank": round(requests / ranks, 2),
        "commit_seconds": round(committed - last, 2),
        "seen_seconds": round(max(job.ended.values()) - last, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
