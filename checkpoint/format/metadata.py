"""The metadata of a step: a small mapping from names to numbers, texts, booleans and null.

It is stored in rank 0's manifest (msgpack), and copied into the decision (JSON), so that listings read no manifest.
Invariant: `from_json(to_json(x))` equals `x`, with the same types and the same bits of each float, NaN included. A
mapping that `check` returned is within all limits and holds exact built-in types.
Failure behaviour: `check` raises `UsageError`, which names the entry. A document with `Bits` that are not a float
counts as damaged.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import msgspec

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import KIB, format_bytes

Value = int | float | bool | str | None
Metadata = dict[str, Value]

MAX_ENTRIES = 64
MAX_NAME = 128
"""The maximum length of a name, in characters."""
MAX_BYTES = 16 * KIB
"""The maximum size of a step's metadata as msgpack, in bytes."""
STALL = "headrace.stall_seconds"
"""The entry in which a saver records for how long `save` blocked rank 0. Readers show it apart from what the user gave."""
_INT64 = 1 << 63


class Bits(msgspec.Struct, frozen=True):
    """A float that JSON cannot express, as the hexadecimal digits of its 64 bits, big-endian."""

    bits: str

    def __post_init__(self) -> None:
        if len(self.bits) != 16:
            raise ValueError("a float has 16 hexadecimal digits")
        bytes.fromhex(self.bits)

    @property
    def value(self) -> float:
        (value,) = struct.unpack(">d", bytes.fromhex(self.bits))
        return float(value)


JsonValue = int | float | bool | str | Bits | None
"""A value as the decision stores it."""


def check(metadata: object) -> Metadata:
    """Return a copy with exact built-in types; `UsageError` if a name or a value cannot be stored.

    None is an empty mapping.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a {type(metadata).__name__}", hint='give a dict, such as {"loss": 2.1}')
    if len(metadata) > MAX_ENTRIES:
        raise UsageError(
            f"the metadata has {len(metadata)} entries, at most {MAX_ENTRIES} can be stored",
            hint="put larger data into the state, or store a file with put_artifact",
        )
    if STALL in metadata:
        raise UsageError(f"metadata {STALL!r} is recorded by Headrace itself", hint="choose another name")
    checked = {_name(name): _value(name, value) for name, value in metadata.items()}
    if (size := len(msgspec.msgpack.encode(checked))) > MAX_BYTES:
        raise UsageError(
            f"the metadata has {format_bytes(size)}, at most {format_bytes(MAX_BYTES)} can be stored",
            hint="put larger data into the state, or store a file with put_artifact",
        )
    return checked


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise UsageError(
            f"{name!r:.200} cannot name an entry of the metadata",
            hint=f"use text of 1 to {MAX_NAME} printable characters",
        )
    return str(name)


def _value(name: object, value: object) -> Value:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise UsageError(
                f"metadata {name!r}: an integer of {value.bit_length()} bits cannot be stored",
                hint="give one of at most 64 bits with its sign, a float or a text",
            )
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"metadata {name!r}: the text is not valid Unicode") from None
        return str(value)
    raise UsageError(
        f"metadata {name!r}: a value of type {type(value).__name__} cannot be stored",
        hint="give a number, a text, a boolean or None; for a tensor or an array of one element, give value.item()",
    )


def with_stall(metadata: Metadata, seconds: float) -> Metadata:
    """The metadata with the duration of the stall; unchanged if there is no room for it."""
    recorded = metadata | {STALL: seconds}
    has_room = len(recorded) <= MAX_ENTRIES and len(msgspec.msgpack.encode(recorded)) <= MAX_BYTES
    return recorded if has_room else metadata


def stall_of(metadata: Mapping[str, Value]) -> float | None:
    """The duration of the stall in seconds, if it is recorded and possible."""
    value = number_of(metadata, STALL)
    return float(value) if value is not None and 0 <= value < math.inf else None


def given(metadata: Mapping[str, Value]) -> Metadata:
    """What the user gave, without what Headrace recorded itself."""
    return {name: value for name, value in metadata.items() if name != STALL}


def flaw_of(metadata: Mapping[str, Value], description: str) -> str:
    """Describe what is wrong with the metadata and the name of the description of a stored object; "" if nothing is."""
    if len(metadata) > MAX_ENTRIES or (metadata and len(msgspec.msgpack.encode(metadata)) > MAX_BYTES):
        return "its metadata is too large"
    if description and not (len(description) == 64 and not set(description) - set("0123456789abcdef")):
        return "the name of its description is not a digest"
    return ""


def has_huge_integers(metadata: Mapping[str, object]) -> bool:
    """Whether an integer has more than 64 bits, which `check` refuses and msgpack cannot express. JSON can."""
    return any(isinstance(value, int) and value.bit_length() > 64 for value in metadata.values())


def to_json(metadata: Mapping[str, Value]) -> dict[str, JsonValue]:
    """The mapping with every float that JSON cannot express as `Bits`."""
    return {
        name: Bits(struct.pack(">d", value).hex()) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metadata.items()
    }


def from_json(stored: Mapping[str, JsonValue]) -> Metadata:
    """The inverse of `to_json`."""
    return {name: value.value if isinstance(value, Bits) else value for name, value in stored.items()}


def number_of(metadata: Mapping[str, Value], name: str) -> int | float | None:
    """The entry, if it is a number that can be compared: not a boolean and not NaN. Else None."""
    value = metadata.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return value


def numbers(metadata: Mapping[str, Value]) -> Metadata:
    """The entries that `number_of` returns."""
    return {name: value for name in metadata if (value := number_of(metadata, name)) is not None}


def printable(value: Value) -> Value:
    """The value for a JSON output of a command: "nan", "inf" and "-inf" for floats that JSON cannot express."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
