"""`headrace ckpt du` adds up the packs of a repository by run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import collect
from headrace.checkpoint.repository.step_usage import _distinct, _Items, _Owners, step_usage
from headrace.checkpoint.repository.usage import usage
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, begin, make, manifest_of, save, tiny_state


def filled(store: Store) -> None:
    """Save three steps of one run, of which one is removed, a step of another run, and a pack that belongs to no run."""
    one = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    two = save(store, make(store, tiny_state(1) | {"more": b"m" * 5000}, step=2, bases=(one,)))
    save(store, make(store, tiny_state(3), step=3, bases=(two,)))
    save(store, make(store, tiny_state(4), step=4, number=begin(store, run="other"), run="other"))
    assert collect.collect(store, [one.of(RUN)]).tombstones
    store.put(names.pack(names.new_id(), names.pack_name(0, "0" * 8, 0)), b"x" * 77)


def test_every_pack_is_counted_once(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        filled(store)
        packs = {info.key: info.size for info in store.list(names.PACKS)}
        found = usage(store)
        exp, other = found.runs
    assert (exp.run, exp.steps, other.run, other.steps) == (RUN, 2, "other", 1)
    assert exp.other_packs == 1  # of the removed step: the later one needs it
    assert (found.unknown_packs, found.unknown_stored) == (1, 77)
    assert found.packs == len(packs) == exp.packs + exp.other_packs + other.packs + found.unknown_packs
    assert found.stored == sum(packs.values())
    assert exp.stored + exp.other_stored + other.stored == found.stored - 77
    assert exp.state == sum(map(len, tiny_state(3).values()))


def test_one_run_is_counted_alone(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        filled(store)
        found = usage(store, "other")
        assert [each.run for each in found.runs] == ["other"]
        assert found.stored == found.runs[0].stored > 0
        with pytest.raises(NotFoundError, match="no run 'none'"):
            usage(store, "none")


def test_the_command_prints_a_line_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(str(tmp_path)) as store:
        filled(store)
    assert ckpt(["du", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{RUN}  2 steps")
    assert "of attempts that are no step" in lines[0]
    assert lines[1].startswith("other  1 step ")
    assert lines[2] == "77 B in 1 pack of no run"
    assert lines[3].endswith("in 5 packs")
    assert ckpt(["du", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packs"] == 5


def test_a_step_counts_its_chunks_and_those_that_only_it_names(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        number, bases = begin(store), list[Base]()
        for step in range(1, 4):
            state = {
                f"{group}/{name}": data for group in ("model", "optimizer") for name, data in tiny_state(step).items()
            }
            bases.append(save(store, make(store, state, step=step, number=number, bases=tuple(bases[-1:]))))
        save(store, make(store, tiny_state(1), step=9, number=begin(store, run="other"), run="other"))
        steps = step_usage(store, by_group=True)
        chunks = [{c.digest: c.stored for c in manifest_of(store, base).chunks} for base in bases]
    named = Counter(digest for each in chunks for digest in each)
    assert [(each.run, each.step) for each in steps] == [(RUN, 1), (RUN, 2), (RUN, 3), ("other", 9)]
    for found, each in zip(steps[1:3], chunks[1:3], strict=True):
        assert found.stored == sum(each.values())
        assert found.unique == sum(size for digest, size in each.items() if named[digest] == 1)
        assert found.shared == found.stored - found.unique > 0
        assert [group.group for group in found.groups] == ["model", "optimizer"]
        assert sum(group.state for group in found.groups) == found.state
        assert all(0 < group.unique < group.stored <= found.stored for group in found.groups)
    assert steps[0].unique < steps[1].unique  # the other run has the same chunks


def test_owners_agree_with_a_count_in_plain_python() -> None:
    chance = np.random.default_rng(0)
    owners, rows = _Owners(), []
    for _ in range(20):
        keys = chance.integers(0, 60, 15).astype(np.uint64)
        items = _distinct([_Items(keys, keys.astype(np.int64) + 1), _Items(keys[:3], keys[:3].astype(np.int64))])
        rows.append({int(key): int(key) + 1 for key in keys})
        assert dict(zip(items.keys.tolist(), items.sizes.tolist(), strict=True)) == rows[-1]
        owners.add(items)
    named = Counter(key for row in rows for key in row)
    for number, row in enumerate(rows):
        assert owners.of(number) == (sum(row.values()), sum(size for key, size in row.items() if named[key] == 1))


def test_the_command_prints_steps_and_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(str(tmp_path)) as store:
        filled(store)
    assert ckpt(["du", str(tmp_path), "--steps", "--run", RUN]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines[:2]] == ["2", "3"]
    assert lines[2].startswith("2 steps, ")
    assert ckpt(["du", str(tmp_path), "--by", "group"]) == 0
    assert "  frozen  " in capsys.readouterr().out
    assert ckpt(["du", str(tmp_path), "--steps", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
