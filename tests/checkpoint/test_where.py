"""Expressions of `--where`: what they mean, and that no text breaks the parser."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import where
from headrace.dataio.core.errors import UsageError

STEP: dict[str, Any] = {
    "loss": 1.5,
    "tokens": 2 * 10**9,
    "note": "warm-up done",
    "done": True,
    "gap": None,
    "broken": math.nan,
    "val/loss": 2.5,
    "a b": 7,
}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("loss < 2", True),
        ("2 > loss", True),
        ("(loss<2)and(tokens>1e9)", True),
        ("loss < 2 and tokens > 1e9", True),
        ("loss < 2 and not tokens > 1e9", False),
        ("loss > 2 or tokens >= 2000000000", True),
        ("loss > 2 or loss > 3 or loss == 1.5", True),
        ("not (loss > 2 or loss > 3)", True),
        ("not not loss = 1.5", True),
        ("loss > 2 and loss > 3 or done == true", True),
        ("loss > 2 and (loss > 3 or done == true)", False),
        ("note == 'warm-up done'", True),
        ('note != "warm-up done"', False),
        ("note < 'x'", True),
        ("val/loss == 2.5", True),
        ("`a b` == 7", True),
        ("done == true", True),
        ("done == 1", False),
        ("done > false", False),
        ("note < 3", False),
        ("note != 3", True),
        ("gap == null", True),
        ("missing == null", True),
        ("missing < 3", False),
        ("missing != 3", True),
        ("loss != null", True),
        ("broken == broken", False),
        ("broken != nan", True),
        ("broken < 1", False),
        ("loss < inf", True),
        ("loss > -1", True),
        ("loss > -inf", True),
    ],
)
def test_what_an_expression_means(expression: str, expected: bool) -> None:
    assert where.parse(expression)(STEP) is expected


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "loss",
        "loss <",
        "< 2",
        "loss < 2 and",
        "(loss < 2",
        "loss < 2)",
        "loss < 2 3",
        "and < 2",
        "loss << 2",
        "loss < 'a",
        "__import__('os')",
        "loss.__class__ == 1 if 1 else 2",
        "loss + 1 < 2",
        "loss < 2; loss > 1",
        "a < " + "9" * 1000,
        " and ".join(["a < 1"] * 65),
        "(" * 40 + "a < 1" + ")" * 40,
        "not " * 40 + "a < 1",
    ],
)
def test_other_texts_are_refused_with_the_position(bad: str) -> None:
    with pytest.raises(UsageError) as caught:
        where.parse(bad)
    assert "character" in str(caught.value)


@given(
    st.text(alphabet="ab<>=!()'\"` 01.e-+andortu", max_size=40),
    st.dictionaries(st.sampled_from("ab"), st.none() | st.booleans() | st.floats() | st.text(max_size=2)),
)
def test_no_text_breaks_the_parser_and_no_value_breaks_the_expression(text: str, values: dict[str, Any]) -> None:
    try:
        test = where.parse(text)
    except UsageError:
        return
    assert test(values) in (True, False)


def test_a_number_keeps_all_its_digits() -> None:
    assert where.parse("n == 9007199254740993")({"n": 9007199254740993})
    assert not where.parse("n == 9007199254740993")({"n": 9007199254740992})
