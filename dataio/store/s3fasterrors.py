"""From what obstore raises to the error of its remedy: the same errors that `s3errors` makes of botocore's.

Invariants: obstore says in text alone what happened, so status, code and message are read from the server's XML inside it, and a
failure of transport from the words of its kind. Its text is shown nowhere, also not as the cause in a traceback, since it
repeats requests and answers.
Failure behaviour: text that says nothing known becomes a plain `HeadraceError` with the first line's words.
"""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Iterator

from obstore.exceptions import BaseError

from headrace.dataio.core.errors import HeadraceError, TransientError, UnsupportedError, UsageError
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3errors import CERTIFICATE_HINT, NETWORK_HINT, REACH_HINT, UnreachableError, from_answer

_TEXT_BYTES = 64 << 10
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([\w.]{1,100})\s*</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{0,1000})</Message>")
_OS_WORDS = re.compile(
    r'kind: (?:ConnectionRefused|ConnectionReset|BrokenPipe|\w*Unreachable),\s*message: "([^"]{1,200})"'
)


@contextlib.contextmanager
def translated_native(config: S3Config, doing: str) -> Iterator[None]:
    """Turn obstore's errors into Headrace's, without obstore's own as their cause."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        found = _translated(str(error)[:_TEXT_BYTES], config, doing)
    else:
        return
    raise found from None


def _translated(text: str, config: S3Config, doing: str) -> HeadraceError:
    if status := _STATUS.search(text):
        code, message = _CODE.search(text), _MESSAGE.search(text)
        words = html.unescape(message[1]) if message else ""
        return from_answer(int(status[1]), code[1] if code else status[1], words, None, config, doing)
    where = f"{doing}: {config.endpoint}"
    if "NotPartial" in text:
        return UnsupportedError(
            f"{where} answered a request for a range with the whole object",
            hint="Headrace needs a server that supports ranged reads; see `headrace doctor URL`",
        )
    if "certificate" in text.lower():
        return UsageError(f"{where}: the server's certificate is not trusted", hint=CERTIFICATE_HINT)
    if "kind: Connect," in text:
        return UnreachableError(f"{where}: {_words(text)}", hint=REACH_HINT)
    if "HttpError" in text or "reqwest" in text:
        return TransientError(f"{where}: {_words(text)}", hint=NETWORK_HINT)
    return HeadraceError(f"{where}: {text.partition(chr(10))[0][:300]}")


def _words(text: str) -> str:
    if found := _OS_WORDS.search(text):
        return found[1]
    for mark, words in (
        ("TimedOut", "the read timed out"),
        ("IncompleteBody", "the body ended early"),
        ("dns error", "unknown host"),
    ):
        if mark in text:
            return words
    return "the connection failed"
