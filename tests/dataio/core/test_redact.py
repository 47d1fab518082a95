"""Secrets are hidden from texts and taken out of options."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.dataio.core import redact as redacting
from headrace.dataio.core.redact import has_secrets, is_secret_name, printable, redact, without_secrets


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host/path",
        "secret=hunter2",
        "aws_secret_access_key = hunter2",
        "{'secret': 'hunter2', 'region': 'eu'}",
        '{"session_token": "hunter2"}',
        "Authorization: hunter2",
        "X-Amz-Signature=hunter2&X-Amz-Date=1",
        "password:hunter2",
        '{"password": "a long hunter2", "region": "eu"}',
        "Authorization: Bearer hunter2",
        "{'Authorization': 'AWS4-HMAC-SHA256 Credential=AK/2026, Signature=hunter2'}",
        "curl -H 'Authorization: Basic hunter2' url",
        "sent Bearer hunter2.hunter2.hunter2",
        "https://host/container?sp=r&sig=hunter2",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2==",
        "api-key: hunter2",
        "passphrase=hunter2",
        "pwd: hunter2",
        "--password hunter2",
        "Cookie: session=hunter2; id=hunter2",
        "ftp://user:p@hunter2@host/x",
        "https://host/x?key=hunter2",
        "hf_hunter2hunter2hunter2hunter2",
        "ghp_hunter2hunter2hunter2hunter2",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    assert "hunter2" not in redact(text)
    assert "***" in redact(text)


@pytest.mark.parametrize("text", ["s3://bucket/key not found", "key=shards/000001.tar", "step 12 of run exp42", ""])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_an_access_key_id_is_hidden_wherever_it_stands() -> None:
    assert redact("denied for AKIAABCDEFGHIJKLMNOP.") == "denied for ***."


_PARTS = ["token", "Authorization", "Bearer ", "sig=", "x" * 17, "://", *"=: '\"@/{}a*&?,\n"]


@given(st.lists(st.sampled_from(_PARTS), max_size=14).map("".join))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    assert redact(redact(text)) == redact(text)


_WORDS = [
    *("SECRET", "Passwd", "password", "passphrase", "credential", "signature", "connection-string", "connectionstring"),
    *("account_key", "SSHKey", "pwd", "sas=", "&key=", "--token ", "hf_", "gho_", "github_pat_", "glpat-", "AIza"),
    *("cookie", "bearer", "AKIA" + "A" * 16, "ASIA" + "7" * 16, "eyJ", "abcdefgh1.", "toKen", "\u017fecret"),
    *("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"),
]


@given(st.lists(st.sampled_from([*_PARTS, *_WORDS]), max_size=14).map("".join))
def test_patterns_that_are_left_out_would_have_matched_nothing(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redacting, "_PATTERNS", tuple((("",), *rest) for _, *rest in redacting._PATTERNS))
        expected = redact(text)
    assert redact(text) == expected


@pytest.mark.parametrize("text", ["a" * 500_000, "token" * 100_000, "token" + " " * 500_000, "://" + "a" * 500_000])
def test_a_long_text_costs_what_it_is_long_and_not_its_square(text: str) -> None:
    assert redact(text) == text


def test_options_lose_their_secrets_at_every_depth() -> None:
    options = {"key": "a", "secret": "b", "region": "eu", "client_kwargs": {"aws_session_token": "c", "verify": False}}
    assert has_secrets(options)
    assert without_secrets(options) == {"region": "eu", "client_kwargs": {"verify": False}}
    assert not has_secrets(without_secrets(options))


def test_an_option_whose_text_holds_a_secret_is_one() -> None:
    options = {"config_kwargs": {"proxies": {"https": "http://me:hunter2@proxy:1", "http": "http://proxy:1"}}}
    assert has_secrets(options)
    assert without_secrets(options) == {"config_kwargs": {"proxies": {"http": "http://proxy:1"}}}


def test_names_of_secrets_are_known_and_others_are_not() -> None:
    assert all(
        map(
            is_secret_name,
            ["key", "secret", "token", "password", "aws_access_key_id", "sas", "account_key", "auth", "Cookie"],
        )
    )
    assert not any(map(is_secret_name, ["region", "endpoint_url", "profile", "keyspace", "monkey", "author"]))


def test_what_a_terminal_obeys_is_shown_as_a_question_mark() -> None:
    assert printable("a\x1b]0;title\x07 \x9b31m\u202eb") == "a?]0;title? ?31m?b"
    assert printable("zwei Zeilen:\n\täöü 語") == "zwei Zeilen:\n\täöü 語"


@pytest.mark.parametrize(
    "options",
    [
        {"headers": [["Authorization", "Bearer hunter2"]]},
        {"client_kwargs": {"headers": (("X-Api-Key", "hunter2"),)}},
        {"proxies": ["http://user:hunter2@host"]},
        {"x": [{"secret": "hunter2"}]},
        {"x": [[{"y": {"passphrase": "hunter2"}}]]},
        {"http_auth": ("user", "hunter2")},
        {"ssh_key": "hunter2"},
        {"body": b"token=hunter2"},
        {"pwd": "hunter2"},
    ],
)
def test_secrets_in_lists_and_by_other_names_are_found(options: dict[str, object]) -> None:
    assert has_secrets(options)
    assert "hunter2" not in repr(without_secrets(options))


def test_lists_without_secrets_stay() -> None:
    options = {"columns": ["key", "text", "token"], "proxies": {"http": "http://proxy:1"}, "size": (1, 2)}
    assert not has_secrets(options)
    assert without_secrets(options) == options | {"size": [1, 2]}
