"""The exhaustive model of tags on a store that applies requests late: what it finds, and what it does not."""

from __future__ import annotations

import pytest

from tests.support.late_tags_model import REMOVED, Rules, explore

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("rules", "states"),
    [
        (Rules(steps=(3,), collectors=2), 30_000),
        (Rules(collectors=0), 5_000),
        (Rules(steps=(3, REMOVED), collectors=0), 3_000),
        (Rules(late=0), 1_000),
    ],
    ids=["a move and two collectors", "two moves", "a move and a removal", "nothing is late"],
)
def test_a_tag_names_what_it_was_given_last_and_that_is_there(rules: Rules, states: int) -> None:
    found = explore(rules)
    assert found.way is None
    assert found.states > states


@pytest.mark.parametrize(
    "rules",
    [Rules(numbered=False, collectors=0), Rules(steps=(3,), collectors=2, all_protect=False)],
    ids=["one record overwritten", "only the newest record protects"],
)
def test_the_search_finds_what_each_rule_is_for(rules: Rules) -> None:
    assert explore(rules).way is not None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules(steps=(3, REMOVED)), Rules(steps=(3,), collectors=2, late=2)],
    ids=["two moves and a collector", "a removal and a collector", "two late requests"],
)
def test_it_does_so_in_a_great_many_orders_more(rules: Rules) -> None:
    assert explore(rules).way is None
