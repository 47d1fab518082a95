"""Expressions over the metadata of steps, such as `loss < 2 and tokens > 1e9`, for `--where`.

    expression = term, {"or", term}            term = factor, {"and", factor}
    factor     = "not", factor | "(", expression, ")" | operand, comparison, operand
    operand    = name | number | text in quotes | true | false | null | nan | inf

A name is an entry of the metadata, or one of the fields `run`, `timeline`, `step`, `time`, `bytes`, `ranks` and
`seconds`. A name with other characters than letters, digits, '_', '.', '/', ':' and '-' is written in backquotes.
Invariant: parsing and evaluating call nothing but this module. The size and the depth of an expression are bounded.
Values of different kinds (numbers, texts, booleans, null) are unequal, and neither is less than the other. An entry that
a step lacks is null.
Failure behaviour: `UsageError` shows the position of the error. Evaluation never fails.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.checkpoint.format.metadata import Value
from headrace.dataio.core.errors import UsageError

MAX_CHARACTERS, MAX_COMPARISONS, MAX_DEPTH = 1000, 64, 32
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf)(?![\w./:]))"
    r"|(?P<name>[A-Za-z_][\w./:-]*)|`(?P<quoted>[^`]+)`"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<sign><=|>=|==|!=|=|<|>|\(|\)))"
)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONSTANTS: dict[str, Value] = {
    "true": True,
    "false": False,
    "null": None,
    "nan": float("nan"),
}
_WORDS = {"and", "or", "not"}
Test = Callable[[Mapping[str, Value]], bool]
_Operand = Callable[[Mapping[str, Value]], Value]


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def parse(text: str) -> Test:
    """The function that evaluates the expression for one step; `UsageError` if it is not an expression.

    Args:
        text (str): The expression, at most 1,000 characters.

    Returns:
        Test: Takes the values of one step by name.

    Raises:
        UsageError: The expression is malformed, too long or nested too deeply.

    Example:
        >>> test = parse("loss < 2 and not (tokens <= 1e9 or note == 'bad')")
        >>> test({"loss": 1.5, "tokens": 2 * 10**9}), test({"tokens": 2 * 10**9})
        (True, False)
    """
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"the expression has {len(text)} characters, at most {MAX_CHARACTERS} are allowed")
    return _Parser(text).whole()


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise _error(text, len(text) - len(text[at:].lstrip()), "this is not part of an expression")
        kind = match.lastgroup or ""
        yield _Token(kind, match[kind], match.start(kind))
        at = match.end()
    yield _Token("end", "the end", len(text))


def _error(text: str, at: int, flaw: str) -> UsageError:
    return UsageError(
        f"--where: {flaw}, at character {at + 1} of {text!r}",
        hint='write comparisons with and, or, not and parentheses, such as "loss < 2 and tokens > 1e9"',
    )


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens = text, list(_tokens(text))
        self._next = self._comparisons = 0

    def whole(self) -> Test:
        test = self._any(0)
        if self._peek.kind != "end":
            self._fail(f"{self._peek.text!r} is unexpected")
        return test

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._peek
        self._next += token.kind != "end"
        return token

    def _is(self, *texts: str) -> bool:
        """Take the next token if it is one of these words or signs."""
        if self._peek.kind in ("name", "sign") and self._peek.text in texts:
            self._next += 1
            return True
        return False

    def _fail(self, flaw: str) -> NoReturn:
        raise _error(self._text, self._peek.at, flaw)

    def _any(self, depth: int) -> Test:
        tests = [self._all(depth)]
        while self._is("or"):
            tests.append(self._all(depth))
        return lambda values: any(test(values) for test in tests)

    def _all(self, depth: int) -> Test:
        tests = [self._factor(depth)]
        while self._is("and"):
            tests.append(self._factor(depth))
        return lambda values: all(test(values) for test in tests)

    def _factor(self, depth: int) -> Test:
        if depth > MAX_DEPTH:
            self._fail(f"the expression is nested deeper than {MAX_DEPTH}")
        if self._is("not"):
            inner = self._factor(depth + 1)
            return lambda values: not inner(values)
        if self._is("("):
            test = self._any(depth + 1)
            if not self._is(")"):
                self._fail("a ')' is missing")
            return test
        return self._comparison()

    def _comparison(self) -> Test:
        self._comparisons += 1
        if self._comparisons > MAX_COMPARISONS:
            self._fail(f"there are more than {MAX_COMPARISONS} comparisons")
        left = self._operand()
        sign = self._peek.text if self._peek.kind == "sign" else ""
        if sign not in {*_COMPARISONS, "==", "=", "!="}:
            self._fail("a comparison is missing")
        self._next += 1
        right = self._operand()
        return lambda values: compare(sign, left(values), right(values))

    def _operand(self) -> _Operand:
        token = self._peek
        value: Value
        if token.kind == "number":
            value = int(token.text) if re.fullmatch(r"[-+]?\d{1,18}", token.text) else float(token.text)
        elif token.kind == "text":
            value = token.text[1:-1]
        elif token.kind == "name" and token.text in _CONSTANTS:
            value = _CONSTANTS[token.text]
        elif token.kind == "quoted" or (token.kind == "name" and token.text not in _WORDS):
            name = self._take().text
            return lambda values: values.get(name)
        else:
            self._fail("a name or a value is missing")
        self._take()
        return lambda values: value


def compare(sign: str, left: Value, right: Value) -> bool:
    """Compare two values; see the module's docstring."""
    same = _kind(left) == _kind(right)
    if sign in ("=", "=="):
        return same and left == right
    if sign == "!=":
        return not same or left != right
    return same and _kind(left) in ("number", "text") and _COMPARISONS[sign](left, right)


def _kind(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    return "text" if isinstance(value, str) else "number"
