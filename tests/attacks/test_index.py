"""An index whose digests are right and whose content is not: an error that names the part, before anything is believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.attacks import forge, peak

MIB = 400
Rows = list[dict[str, Any]]


def rows(change: Callable[[Rows], object]) -> Callable[[Path], None]:
    return lambda folder: forge.change_rows(folder, change)


def member(row: int, number: int = 0, **values: int) -> Callable[[Path], None]:
    return rows(lambda found: found[row]["members"][number].update(values))


def columns(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: forge.with_part(folder, forge.parquet(change(forge.table(folder))))


def retyped(name: str, kind: Any, values: list[Any]) -> Callable[[Path], None]:
    def change(table: Any) -> Any:
        return table.set_column(table.column_names.index(name), name, pa.array(values, kind))

    return columns(change)


def truncated(folder: Path) -> None:
    path = folder / forge.document(folder)["index"][0]["key"]
    forge.with_part(folder, path.read_bytes()[:-20])


def footer_lies(folder: Path) -> None:
    """The Parquet footer claims more rows than there are: the thrift varint of num_rows (2) becomes larger."""
    data = bytearray((folder / forge.document(folder)["index"][0]["key"]).read_bytes())
    length = int.from_bytes(data[-8:-4], "little")
    footer = bytes(data[-8 - length : -8])
    at = footer.rindex(b"\x16\x04")
    data[len(data) - 8 - length + at + 1] = 0x7E
    forge.with_part(folder, bytes(data))


def expanding(folder: Path) -> None:
    """A part of some kilobytes in which every text is the same 64 MiB string."""
    table = forge.table(folder)
    huge = pa.array(["x" * (64 << 20)]).take(pa.array([0] * table.num_rows))
    forge.with_part(
        folder, forge.parquet(table.set_column(table.column_names.index("text"), table.schema.field("text"), huge))
    )


def many_rows(folder: Path) -> None:
    forge.change_document(folder, lambda d: (d["index"][0].update(rows=10**15), d.update(samples=10**15)))


ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "wrong type": (retyped("duration", pa.string(), ["1", "2"]), ""),
    "wrong type of a list": (retyped("members", pa.list_(pa.int64()), [[1], [2]]), ""),
    "missing column": (columns(lambda table: table.drop_columns(["members"])), ""),
    "missing key": (columns(lambda table: table.drop_columns(["key"])), ""),
    "not parquet": (lambda folder: forge.with_part(folder, b"PAR1" + bytes(1000) + b"PAR1"), ""),
    "truncated": (truncated, ""),
    "footer lies": (footer_lies, ""),
    "behind the end": (member(1, offset=10**9), "outside its shard"),
    "across the end": (member(1, length=10**9), "outside its shard"),
    "negative offset": (member(0, offset=-512), "outside its shard"),
    "negative length": (member(0, length=-1), "outside its shard"),
    "overflow": (member(0, offset=2**63 - 1, length=2**63 - 1), "outside its shard"),
    "overlap": (member(0, length=1600), "overlap"),
    "one first member twice": (
        rows(lambda found: found[1].update(members=found[0]["members"], bytes=found[0]["bytes"])),
        "order",
    ),
    "one range with bytes of another": (rows(lambda found: found[1].update(members=found[0]["members"])), "sum"),
    "foreign shard": (rows(lambda found: found[0].update(shard="../../etc/passwd")), "not a shard of this"),
    "equal keys": (rows(lambda found: found[1].update(key="a")), "same key"),
    "out of order": (rows(lambda found: found.reverse()), "order"),
    "no members": (rows(lambda found: found[0].update(members=[])), "empty"),
    "rows that are not there": (
        lambda folder: forge.with_part(folder, forge.parquet(forge.table(folder).slice(0, 1))),
        "rows",
    ),
    "absurd number of rows": (many_rows, ""),
    "infinite duration": (rows(lambda found: found[0].update(duration=float("inf"))), "finite"),
    "nan duration": (rows(lambda found: found[0].update(duration=float("nan"))), "finite"),
    "negative duration": (rows(lambda found: found[0].update(duration=-1.0)), "negative"),
    "fields that are no json": (rows(lambda found: found[1].update(fields="{")), "fields"),
    "fields with nan": (rows(lambda found: found[1].update(fields='{"a": NaN}')), "NaN"),
    "fields too deep": (rows(lambda found: found[1].update(fields='{"a":' * 100_000)), "fields"),
    "fields that are a list": (rows(lambda found: found[1].update(fields="[]")), "fields"),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> peak.Outcome:
    folder = tmp_path_factory.mktemp("forged")
    copies = forge.forged(folder, [attack for attack, _ in ATTACKS.values()])
    return peak.run("tests.attacks.calls:read_dataset", copies)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_index_is_corruption_that_names_the_part(outcome: peak.Outcome, attack: str) -> None:
    raised = list(outcome.raised.values())[1 + list(ATTACKS).index(attack)]
    assert raised is not None
    assert raised[1] == "corruption"
    assert "index/" in raised[2] or "version" in raised[2] or "sample" in raised[2]
    assert ATTACKS[attack][1] in raised[2]


def test_the_unforged_index_is_read(outcome: peak.Outcome) -> None:
    assert next(iter(outcome.raised.values())) is None


def test_no_forged_index_fills_the_memory(outcome: peak.Outcome) -> None:
    assert len(outcome.raised) == 1 + len(ATTACKS)
    assert outcome.mib < MIB


@pytest.mark.slow
def test_a_part_that_expands_costs_what_it_holds(tmp_path: Path) -> None:
    folder = forge.good(tmp_path / "set")
    expanding(folder)
    outcome = peak.run("tests.attacks.calls:read_dataset", [folder])
    assert outcome.mib < MIB + 1500
