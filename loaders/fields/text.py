"""Text, JSON and files as they are: `Text`, `Json` and `Bytes`.

Purpose: deliver captions, annotations, camera poses and boxes, and files that the trainer decodes itself.

Invariants:
- Text is UTF-8. A byte order mark is allowed and removed.
- A text that is chosen at random depends on the loader's seed, the epoch and the sample.
- JSON is parsed within the bounds of `headrace.dataio.core.json` and `limits.SAMPLE_JSON_BYTES`.
- Numbers are never changed: a number that its dtype cannot hold is an error. Floating-point numbers are rounded to the
  dtype's precision.

Failure behaviour: damaged text and JSON raise `CorruptionError`. A path that a sample does not have, and a value of
another kind, such as numbers that do not form a tensor, raise `MissingValueError`. Files that are too large, and samples
without a caption, raise `UnsupportedError`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as option
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, MissingValueError, UnsupportedError, UsageError
from headrace.dataio.core.json import parse_json
from headrace.dataio.core.limits import SAMPLE_JSON_BYTES, format_bytes
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.media.messages import TEXT_BYTES
from headrace.dataio.shards.sample import Sample
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.fields.options import (
    COLLATES,
    ITEM_BYTES,
    KEEPS,
    NUMPY_DTYPES,
    check_dtype,
    check_file,
    check_options,
    converted,
    keepable,
    listed,
)
from headrace.loaders.interfaces import Collate
from headrace.loaders.validation import checked

if TYPE_CHECKING:
    import torch

_BY_DTYPE = cast("Collate", None)
"""The default of `Json.collate`, which depends on its `dtype`."""
_JSON_EXPANSION = 30
"""Bytes of memory that a byte of JSON takes when it is parsed, at most (see `limits.SAMPLE_JSON_BYTES`)."""
_TEXT_EXPANSION = 4
"""Bytes of memory that a byte of UTF-8 takes in a str, at most."""


@suggests_arguments(key="path")
@dataclass(frozen=True)
class Text(Field):
    """The text of a sample. The entry of a batch is a list of str.

    Leading and trailing white space is removed.

    Args:
        file (str | None): extension of a UTF-8 text file, at most 1 MiB; with `path`, of a JSON file. Default: None, the
            caption in the index; with `path`, "json".
        path (str): where a JSON file has the text, or a list of texts, as for `Json`. Default: "", no JSON file.
        choose (str): which text of a list is taken. Empty texts are left out. Default: "first".

            - "first": the first one.
            - "random": another one in each epoch, by the loader's seed. Fields with lists of the same length choose the
              same position, as long as no text is empty and the weights are equal.
        weights (str): with `choose="random"`, where the JSON file has a list with a number for each text. A text is
            chosen in proportion to its number. Default: "", equal numbers.
        required (bool): leave out samples that lack the file or the caption. With False, their text is None. Default:
            True. A JSON file without a text is a bad sample; with `required=False`, the sample has no text.

    Raises:
        UsageError: for an impossible extension, path or choice.

    Example:
        >>> Text(file="title.txt").files
        ('title.txt',)
        >>> Text(path="captions", choose="random").files
        ('json',)
    """

    file: str | None = None
    _: KW_ONLY
    path: str = ""
    choose: Literal["first", "random"] = "first"
    weights: str = ""
    collate: Collate = option(default="list", init=False, repr=False)
    required: bool = True
    files: tuple[str, ...] = option(init=False, repr=False)
    uses_caption: bool = option(init=False, repr=False)

    def __post_init__(self) -> None:
        _steps(checked("Text's path", self.path, str))
        _steps(checked("Text's weights", self.weights, str))
        if self.choose not in ("first", "random"):
            raise UsageError(f"Text's choose cannot be {self.choose!r:.80}", hint="give 'first' or 'random'")
        if self.choose == "random" and not self.path:
            hint = 'give the path of a list of texts, such as Text(path="captions", choose="random")'
            raise UsageError("Text's choose='random' needs a path", hint=hint)
        if self.weights and self.choose != "random":
            raise UsageError("Text's weights need choose='random'", hint="leave them out, or give both")
        if self.path and self.file is None:
            object.__setattr__(self, "file", "json")
        object.__setattr__(self, "uses_caption", self.file is None)
        files = () if self.file is None else (check_file(self, self.file),)
        check_options(self, *files)

    def decode(self, data: FieldInput) -> str | None:
        if self.path:
            return self._from_json(data)
        if self.file is not None:
            return read_text(data.files[self.file], f".{self.file}")
        if data.sample.text is None and self.required:
            raise UnsupportedError("the sample has no caption", hint="Text(required=False) keeps such samples")
        return data.sample.text

    def nbytes(self, sample: Sample) -> int:
        return (_JSON_EXPANSION if self.path else _TEXT_EXPANSION) * super().nbytes(sample)

    def _from_json(self, data: FieldInput) -> str | None:
        what = f".{self.file}"
        document = read_json(data.files[str(self.file)], what)
        try:
            value = value_at(document, self.path, what)
        except MissingValueError as error:
            if self.required:
                raise keepable(error) from None
            return None
        texts = texts_of(value, f"{self.path!r:.80} in {what}")
        numbers = [1.0] * len(texts)
        if self.weights and texts:
            numbers = weights_of(value_at(document, self.weights, what), len(texts), f"{self.weights!r:.80} in {what}")
        usable = [(text, number) for text, number in zip(texts, numbers, strict=True) if text and number]
        if not usable:
            if self.required:
                raise MissingValueError(f"{self.path!r:.80} in {what} holds no text", hint=KEEPS)
            return None
        chosen = usable[0][0] if self.choose == "first" else _drawn(usable, data)
        return _checked_text(chosen, f"a text of {self.path!r:.80} in {what}")


def texts_of(value: Any, what: str) -> list[str]:
    """The texts of a JSON value: a string, a list of strings, or null. White space around each is removed.

    Args:
        value: the parsed JSON value.
        what: name of the value, for errors.

    Raises:
        MissingValueError: the value is of another kind.
    """
    texts = value if isinstance(value, list) else [] if value is None else [value]
    for text in texts:
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise MissingValueError(f"{what} is not a text or a list of texts: it has a value of type {kind}")
    return [text.strip() for text in texts]


def weights_of(value: Any, count: int, what: str) -> list[float]:
    """The weights of `count` texts: a list of numbers that are not negative and not all 0, or one number for one text.

    Args:
        value: the parsed JSON value.
        count: number of texts.
        what: name of the value, for errors.

    Raises:
        MissingValueError: the value is of another kind, or has another number of weights.
    """
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers):
        raise MissingValueError(f"{what} is not a list of numbers that are not negative")
    if len(numbers) != count:
        raise MissingValueError(f"{what} has {len(numbers)} numbers for {count} texts")
    weights = [float(number) for number in numbers]
    if not 0 < sum(weights) < math.inf:
        raise MissingValueError(f"the sum of {what} is not a positive number")
    return weights


def _drawn(usable: Sequence[tuple[str, float]], data: FieldInput) -> str:
    """One of the texts, each with a chance in proportion to its number."""
    import torch

    ends = list(itertools.accumulate(number for _, number in usable))
    place = torch.rand((), dtype=torch.float64, generator=data.generator()).item() * ends[-1]
    return usable[min(bisect.bisect_right(ends, place), len(usable) - 1)][0]


def _checked_text(text: str, what: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can escape half of a character
        raise CorruptionError(f"{what} is not Unicode text: {error}") from error
    if size > TEXT_BYTES:
        raise UnsupportedError(f"{what} is larger than {format_bytes(TEXT_BYTES)}")
    return text


@suggests_arguments(key="path")
@dataclass(frozen=True)
class Json(Field):
    """A value of a sample's JSON file.

    Args:
        path (str): where the value is, such as "camera.pose" or "tracks[0].box". Names are separated by dots, and
            elements of a list are counted from 0. A name with other characters is written as `["a.b"]`. Default: "",
            the whole document.
        file (str): extension of the file, at most 4 MiB. Default: "json".
        dtype (torch.dtype | str | None): make a tensor of nested lists of numbers, or of one number. Default: None, the
            parsed value.
        collate (str | Callable): how a batch holds the values: "stack", "pad", "concat", "list" or a function. Without
            `dtype` only "list" and functions. Default: "stack" with `dtype`, otherwise "list".
        required (bool): leave out samples that lack the file. Default: True. A file without the path is a bad sample;
            with `required=False`, the sample has no value.

    Raises:
        UsageError: for an impossible path, an unknown dtype, or a `collate` that needs a dtype.

    Example:
        >>> Json("camera.pose", dtype="float32").collate
        'stack'
        >>> Json("tracks[0].label").collate
        'list'
    """

    path: str = ""
    _: KW_ONLY
    file: str = "json"
    dtype: torch.dtype | str | None = None
    collate: Collate = _BY_DTYPE
    required: bool = True
    files: tuple[str, ...] = option(init=False, repr=False)

    def __post_init__(self) -> None:
        _steps(checked("Json's path", self.path, str))
        dtype = check_dtype(self, self.dtype, _REAL)
        if self.collate is _BY_DTYPE:
            object.__setattr__(self, "collate", "list" if dtype is None else "stack")
        check_options(self, check_file(self, self.file), collates=("list",) if dtype is None else COLLATES)

    def decode(self, data: FieldInput) -> Any:
        what = f".{self.file}"
        value = read_json(data.files[self.file], what)
        try:
            found = value_at(value, self.path, what)
        except MissingValueError as error:
            if self.required:
                raise keepable(error) from None
            return None
        if self.dtype is None or (found is None and not self.required):
            return found
        return tensor_of(found, str(self.dtype), f"{self.path or 'the value'!r} in {what}")

    def nbytes(self, sample: Sample) -> int:
        return _JSON_EXPANSION * super().nbytes(sample)


@suggests_arguments()
@dataclass(frozen=True)
class Bytes(Field):
    """A file as it is stored.

    Args:
        file (str): extension of the file.
        collate (str | Callable): how a batch holds the files. Default: "list".

            - "list": a list of `bytes` objects.
            - "concat": uint8 (sum of sizes,), with the offsets of the files.
            - "pad": uint8 (B, largest size), with the sizes of the files.
            - "stack": uint8 (B, size); all files have the same size.
            - A function: called with the list of `bytes` objects.
        required (bool): leave out samples that lack the file. Default: True.

    Raises:
        UsageError: for an impossible extension or `collate`.

    Example:
        >>> Bytes("tokens.bin", collate="concat").files
        ('tokens.bin',)
    """

    file: str
    _: KW_ONLY
    collate: Collate = "list"
    required: bool = True
    files: tuple[str, ...] = option(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self, check_file(self, self.file))

    def decode(self, data: FieldInput) -> bytes | npt.NDArray[np.uint8]:
        contents = data.files[self.file]
        return (
            bytes(contents) if callable(self.collate) or self.collate == "list" else np.frombuffer(contents, np.uint8)
        )


def read_text(data: memoryview, what: str = "the text") -> str:
    """Decode a UTF-8 text file, without a byte order mark and without white space around the text.

    Args:
        data: the whole file.
        what: name of the file, for errors.
    """
    if len(data) > TEXT_BYTES:
        raise UnsupportedError(f"{what} is larger than {format_bytes(TEXT_BYTES)}")
    try:
        return bytes(data).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"{what} is not UTF-8 text, at offset {error.start}") from error


# --- JSON


def read_json(data: memoryview, what: str = "the JSON") -> Any:
    """Parse a sample's JSON file.

    Args:
        data: the whole file.
        what: name of the file, for errors.
    """
    if len(data) > SAMPLE_JSON_BYTES:
        raise UnsupportedError(f"{what} is larger than {format_bytes(SAMPLE_JSON_BYTES)}")
    try:
        return parse_json(bytes(data), max_bytes=SAMPLE_JSON_BYTES)
    except ValueError as error:
        raise CorruptionError(f"{what} is not JSON: {error}") from error


_STEP = re.compile(r'\.?([^.\[\]"]+)|\[(\d{1,9})\]|\[("(?:[^"\\]|\\.)*")\]')


@functools.lru_cache(maxsize=256)
def _steps(path: str) -> tuple[str | int, ...]:
    """The names and indices of a path, or `UsageError`."""
    steps, at = list[str | int](), 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None or (path[at] == ".") != (at > 0 and match[1] is not None):
            raise _not_a_path(path)
        if match[3] is not None:
            try:
                steps.append(json.loads(match[3]))
            except ValueError:
                raise _not_a_path(path) from None
        else:
            steps.append(match[1] if match[1] is not None else int(match[2]))
        at = match.end()
    return tuple(steps)


def _not_a_path(path: str) -> UsageError:
    hint = 'write "camera.pose", "tracks[0].box" or \'["a.b"].c\''
    return UsageError(f"{path!r:.200} is not a path in a JSON document", hint=hint)


def value_at(value: Any, path: str, what: str = "the JSON") -> Any:
    """The value at `path`.

    Raises:
        MissingValueError: the document does not have this path. The hint has the names that exist where it ends.
    """
    passed = ""
    for step in _steps(path):
        if isinstance(step, str):
            if not isinstance(value, dict) or step not in value:
                raise _missing(path, passed, value, what)
            passed += f".{step}" if passed else step
        else:
            if not isinstance(value, list) or step >= len(value):
                raise _missing(path, passed, value, what)
            passed += f"[{step}]"
        value = value[step]
    return value


def _missing(path: str, passed: str, value: Any, what: str) -> MissingValueError:
    where = f"{passed!r:.80}" if passed else "the document"
    if isinstance(value, dict):
        has = f"has {listed(value)}"
    elif isinstance(value, list):
        has = f"is a list of {len(value)}"
    else:
        has = "is null" if value is None else f"is one {type(value).__name__}"
    return MissingValueError(f"{what} has no {path!r:.80}", hint=f"{where} {has}")


_REAL = tuple(name for name in ITEM_BYTES if not name.startswith("complex") and name != "float8_e8m0fnu")


def tensor_of(value: Any, dtype: str, what: str = "the value") -> Any:
    """Nested lists of numbers as an array or tensor. Integers are exact.

    Args:
        value: a parsed JSON value.
        dtype: name of a torch dtype. With "bool", all values are true or false.
        what: name of the value, for errors.

    Raises:
        MissingValueError: the lists are ragged, have other values than numbers, or numbers that the dtype cannot hold.
    """
    shape, flat = list[int](), list[Any]([value])
    while flat and isinstance(flat[0], list):
        length = len(flat[0])
        if not all(isinstance(one, list) and len(one) == length for one in flat):
            raise MissingValueError(f"{what} is not a tensor: its lists differ in length or depth")
        shape.append(length)
        flat = [item for one in flat for item in one]
    kinds = (bool,) if dtype == "bool" else (int, float)
    wrong = next((one for one in flat if type(one) not in kinds), kinds)
    if wrong is not kinds:
        kind = "null" if wrong is None else type(wrong).__name__
        message = f"{what} is not a tensor of dtype {dtype}: it has a value of type {kind}"
        raise MissingValueError(message, hint=KEEPS if value is None else "")
    if dtype.startswith(("int", "uint")):
        array = _integers(flat, dtype, what)
    elif dtype == "bool":
        array = np.array(flat, np.bool_)
    else:
        return _floats(flat, dtype, what).reshape(shape)
    return array.reshape(shape)


def _integers(flat: list[Any], dtype: str, what: str) -> npt.NDArray[Any]:
    whole = [int(one) for one in flat]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    for given, found in zip(flat, whole, strict=True):
        if given != found or not low <= found <= high:
            raise MissingValueError(f"{what} is not a tensor of dtype {dtype}: it has the number {str(given)[:40]}")
    return np.array(whole, dtype)


def _floats(flat: list[Any], dtype: str, what: str) -> Any:
    if dtype in NUMPY_DTYPES:
        most = float(np.finfo(dtype).max)
    else:
        import torch

        most = torch.finfo(getattr(torch, dtype)).max
    for one in flat:
        if not -most <= one <= most:  # exact for an int of any size
            raise MissingValueError(f"{what} is not a tensor of dtype {dtype}: it has the number {str(one)[:40]}")
    return converted(np.array([float(one) for one in flat], np.float64), dtype)
