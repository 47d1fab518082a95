"""`headrace ckpt du` adds up the packs of a repository by run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import collect
from headrace.checkpoint.repository.usage import usage
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, begin, make, save, tiny_state


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
