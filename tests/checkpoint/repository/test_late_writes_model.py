"""The exhaustive model of the protocol on a store that applies requests late: what it finds, and what it does not."""

from __future__ import annotations

import pytest

from tests.support.late_writes_model import COMMIT_A, FATE, MANIFEST, Rules, explore

pytestmark = pytest.mark.slow

WRITTEN_ONCE = Rules().conditional


@pytest.mark.parametrize(
    ("rules", "states"),
    [
        (Rules(collectors=0), 5000),
        (Rules(workers=1), 8000),
        (Rules(workers=1, tier=True, removes_new=False), 60_000),
        (Rules(workers=1, follower=True, removes_new=False), 60_000),
    ],
    ids=["a worker and its replacement", "a worker and a collector", "a part from a tier", "a rank without a lease"],
)
def test_no_order_of_requests_breaks_a_visible_step(rules: Rules, states: int) -> None:
    found = explore(rules)
    assert found.way is None
    assert found.states > states


@pytest.mark.parametrize(
    "rules",
    [
        Rules(own_packs=False, collectors=0),
        Rules(conditional=WRITTEN_ONCE - {MANIFEST}, collectors=0),
        Rules(conditional=WRITTEN_ONCE - {FATE}, workers=1),
        Rules(conditional=WRITTEN_ONCE - {COMMIT_A}, workers=1),
        Rules(workers=1, tier=True, removes_new=False, own_lease=False),
        Rules(workers=1, tier=True, removes_new=False, together=False),
        Rules(workers=1, follower=True, removes_new=False, checks_base=False),
        Rules(workers=1, follower=True, collectors=0, waits=False),
    ],
    ids=[
        "packs of one name",
        "manifests overwritten",
        "decisions overwritten",
        "COMMIT overwritten",
        "leases of one name",
        "leases apart",
        "bases unchecked",
        "groups of some",
    ],
)
def test_the_search_finds_what_each_rule_is_for(rules: Rules) -> None:
    assert explore(rules).way is not None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules(workers=1, late=3), Rules(workers=1, collectors=2), Rules(workers=1, follower=True, late=2)],
    ids=["replacement and collector", "three late requests", "two collectors", "a rank without a lease"],
)
def test_no_order_of_many_more_requests_does_either(rules: Rules) -> None:
    assert explore(rules).way is None
