"""Errors of obstore, which repeat what was sent, show no secret."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.bucket_errors import translated_obstore

WHERE = SimpleNamespace(endpoint="https://store.example", bucket="b")
KEY = "q" * 400


def shown(text: str) -> str:
    from obstore.exceptions import GenericError

    with pytest.raises(HeadraceError) as raised, translated_obstore(WHERE, "reading s3://b/k"):
        raise GenericError(text)
    assert raised.value.__cause__ is None
    return str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        f"could not parse https://user:{KEY}@host/b/k",
        f"odd: https://host/b/k?X-Amz-Credential={KEY}&X-Amz-Signature={KEY} was refused",
        f"odd: https://host/b/k?sv=2024&sig={KEY} was refused",
        f"odd: eyJhbGciOiJub25l.{KEY}.{KEY}",
        f"odd: Authorization: AWS4-HMAC-SHA256 Credential={KEY}",
    ],
)
@pytest.mark.parametrize("before", ["", "word " * 50])
def test_no_part_of_a_secret_is_shown_wherever_the_text_is_cut(text: str, before: str) -> None:
    found = shown(before + text)
    assert "qqq" not in found
    assert "reading s3://b/k: https://store.example" in found


def test_a_long_text_is_cut_after_a_word_and_says_so() -> None:
    found = shown("word " * 200 + "\nsecond line")
    assert found.endswith("word…")
    assert len(found) < 400
    assert shown("short\nsecond line").endswith(": short")
