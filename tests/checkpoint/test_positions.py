"""The positions of loaders are found in a saved tree, whatever the order of the loader and wherever it is."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.checkpoint.positions import loader_positions
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.tree import StatefulNode

GOLDEN = Path(__file__).parents[1] / "golden" / "0.1" / "expected.json"


def test_loaders_of_every_kind_are_found_with_their_datasets() -> None:
    states = {name: found["state"] for name, found in json.loads(GOLDEN.read_text())["loaders"].items()}
    encoded = tree.encode({"loaders": {name: StatefulNode("other", state) for name, state in states.items()}, "n": 3})
    found = loader_positions(encoded)
    assert found.keys() == {f"loaders/{name}" for name in states}
    for name, state in states.items():
        position = found[f"loaders/{name}"]
        assert (position["epoch"], position["batch"]) == (state["epoch"], state["batch"])
        if "sources" in state:
            assert position["datasets"] == {source: row[:2] for source, row in state["sources"].items()}
        else:
            assert position["dataset"] == [state["version"], state["digest"]]


def test_other_states_have_no_positions() -> None:
    assert loader_positions(tree.encode({"seed": 1, "epoch": 2, "batch": 3, "list": [{"epoch": 1}]})) == {}
    assert loader_positions(b"no tree") == {}
