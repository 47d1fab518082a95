"""A checkpoint repository whose digests are right and whose author is not: indices that point outside, sizes without end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import chunking, documents
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.tree import MetaNode, PartsNode, TensorRef
from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError

RUN = "r"


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with Checkpointer(str(folder), run=RUN, sidecar=None, compression="zstd") as checkpointer:
        checkpointer.save(1, state).result(60)
    return folder


def forge(folder: Path, change: Callable[[manifests.Manifest], manifests.Manifest]) -> Path:
    """Change the step's manifest, and the decision that names its digest."""
    (path,) = folder.glob("runs/r/*/*/*/rank-*.manifest")
    data = manifests.encode(change(manifests.decode(path.read_bytes(), path.relative_to(folder).as_posix())))
    fate = documents.decode((path.parent / "fate").read_bytes(), documents.Decision, "fate")
    fate = msgspec.structs.replace(fate, manifests=(chunking.digest(data).hex(),))
    for target, body in ((path, data), (path.parent / "fate", documents.encode(fate))):
        target.unlink()
        target.write_bytes(body)
    return folder


def restored(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    with Checkpointer(str(folder), run=RUN, sidecar=None) as checkpointer:
        checkpointer.restore(state)
    return state


def sparse(kind: str, index: int) -> torch.Tensor:
    """A sparse 4 x 4 tensor of one element, whose column is said to be `index`."""
    one, column = torch.ones(1), torch.tensor([index])
    if kind == "coo":
        where = torch.stack([torch.tensor([1]), column])
        return torch.sparse_coo_tensor(where, one, (4, 4), check_invariants=False, is_coalesced=True)
    layout = getattr(torch, f"sparse_{kind}")
    return torch.sparse_compressed_tensor(
        torch.tensor([0, 1, 1, 1, 1]), column, one, (4, 4), layout=layout, check_invariants=False
    )


@pytest.mark.parametrize(("kind", "index"), [("coo", -1), ("coo", 4), ("coo", 10**12), ("csr", 10**12), ("csc", 4)])
@pytest.mark.filterwarnings("ignore:Sparse .* beta state")
def test_indices_of_a_sparse_tensor_that_point_outside_are_refused(tmp_path: Path, kind: str, index: int) -> None:
    saved(tmp_path, {"s": sparse(kind, index), "w": torch.ones(3)})
    state = {"s": sparse(kind, 2), "w": torch.zeros(3)}
    with pytest.raises(CorruptionError, match=f"s: the checkpoint's {kind} tensor is not valid"):
        restored(tmp_path, state)
    assert torch.equal(state["s"].to_dense(), sparse(kind, 2).to_dense())
    assert state["w"].sum() == 0  # nothing was changed
    good = restored(saved(tmp_path / "good", {"s": sparse(kind, 3)}), {"s": sparse(kind, 2)})
    assert torch.equal(good["s"].to_dense(), sparse(kind, 3).to_dense())


@pytest.mark.filterwarnings("ignore:Sparse .* beta state")
def test_an_optimizers_slot_is_checked_before_the_optimizer_gets_it(tmp_path: Path) -> None:
    def optimizer(index: int) -> torch.optim.Optimizer:
        made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4, 4))], lr=1.0, momentum=0.9)
        made.state[made.param_groups[0]["params"][0]] = {"momentum_buffer": sparse("coo", index)}
        return made

    saved(tmp_path, {"o": optimizer(10**12)})
    here = optimizer(1)
    with pytest.raises(CorruptionError, match="is not valid"):
        restored(tmp_path, {"o": here})
    (slots,) = here.state.values()
    assert slots["momentum_buffer"].to_dense()[1, 1] == 1


def document_of(value: object) -> Callable[[manifests.Manifest], manifests.Manifest]:
    return lambda found: msgspec.structs.replace(found, tree=tree.encode({"extra": value, "w": TensorRef("w")}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (PartsNode("coo", {"shape": [4], "coalesced": True}, {"indices": TensorRef("w")}), "is not valid"),
        (PartsNode("coo", {"shape": [4]}, {"indices": TensorRef("w"), "values": TensorRef("w")}), "is not valid"),
        (PartsNode("coo", {"shape": "x", "coalesced": True}, {"indices": TensorRef("w"), "values": 3}), "is not valid"),
        (PartsNode("csr", {"shape": [4, 4]}, {"compressed": TensorRef("w"), "plain": 1, "values": 2}), "is not valid"),
        (MetaNode("os", (3,)), "meta tensor"),
        (MetaNode("float32", (1 << 40, 1 << 40)), "meta tensor"),
        (TensorRef("../../etc/passwd"), "which it does not hold"),
    ],
)
def test_a_tree_that_does_not_fit_its_tensors_is_damage(tmp_path: Path, value: object, words: str) -> None:
    forge(saved(tmp_path, {"extra": 1, "w": torch.ones(3)}), document_of(value))
    state: dict[str, Any] = {"extra": 0, "w": torch.zeros(3)}
    with pytest.raises(CorruptionError, match=words):
        restored(tmp_path, state)
    assert state["w"].sum() == 0
    if isinstance(value, TensorRef):
        with pytest.raises(CorruptionError, match=words):
            read(str(tmp_path), run=RUN)


def test_a_tensor_that_is_larger_than_the_memory_is_not_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk of a megabyte, named a thousand times, is a gigabyte; a few more names are as much as anyone likes."""
    saved(tmp_path, {"extra": torch.zeros(1 << 18)})

    def repeated(found: manifests.Manifest) -> manifests.Manifest:
        (tensor,) = found.tensors
        raw = found.chunks[0].raw
        spans = tuple(manifests.Span(0, 0, raw) for _ in range(1024))
        shape = (raw * len(spans),)
        tensor = msgspec.structs.replace(tensor, dtype="uint8", shape=shape, offset=(0,), local=shape, spans=spans)
        return msgspec.structs.replace(found, tensors=(tensor,))

    forge(tmp_path, repeated)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1 << 20
    monkeypatch.setattr(limits, "free_memory", lambda: 1000 << 20)
    with read(str(tmp_path), run=RUN) as step:
        assert step["extra"].shape == (1 << 30,)
        assert step["extra"][5:9].tolist() == [0] * 4
        with pytest.raises(CapacityError, match=r"1\.0 GiB of memory, and 1000 MiB are free"):
            step["extra"].read()
    with pytest.raises(CapacityError, match="1000 MiB are free"):
        restored(shutil.copytree(tmp_path, tmp_path.with_name("again")), {"extra": None})


def test_how_much_memory_is_free_is_between_nothing_and_all_of_it() -> None:
    assert 0 < limits.free_memory() < 1 << 50


def test_a_tensors_name_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, {"w\x1b]0;title\x07\nclean": torch.ones(3)})
    assert ckpt(["show", str(tmp_path), "--run", RUN, "--tensors"]) == 0
    (pack,) = tmp_path.glob("packs/*/*.pack")
    size = pack.stat().st_size
    pack.unlink()
    pack.write_bytes(bytes(size))
    assert ckpt(["check", str(tmp_path)]) == 4
    said = capsys.readouterr().out
    assert said.count("w?]0;title??clean") == 3
    assert "\x1b" not in said
