"""Chunks stored as differences from a base: exact, one link long, chosen where they pay, protected and checked like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import codec, manifest, names
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import StepOfRun
from headrace.checkpoint.format.manifest import DELTAS, RAW, Manifest
from headrace.checkpoint.handle import SaveResult
from headrace.checkpoint.repository import check as checking
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import collect
from headrace.checkpoint.repository.fetch import open_step
from headrace.checkpoint.saving import compression
from headrace.checkpoint.saving.compression import Sample, decide, worth_delta
from headrace.checkpoint.saving.dedup import KnownChunks
from headrace.checkpoint.saving.progress import add_stored
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import flip

ATTEMPT = names.new_id()


def link(size: int, name: bytes = bytes(32)) -> codec.Link:
    return codec.Link(name, ATTEMPT, "00000-0123abcd-0", 0, size, size, RAW)


@given(st.binary(min_size=1, max_size=3000), st.integers(0), st.sampled_from([*DELTAS]))
def test_a_difference_gives_back_the_very_bytes_with_its_base_and_nothing_without(
    data: bytes, seed: int, kind: int
) -> None:
    base = np.random.default_rng(seed).bytes(len(data))
    stored = memoryview(codec.encode_difference(data, base, link(len(data)), kind))
    assert codec.link_of(stored) == link(len(data))
    out = codec.decode_difference(stored, memoryview(base), len(data), kind)
    assert out is not None
    assert bytes(out) == data
    assert codec.decode_difference(stored, memoryview(base + b"x"), len(data), kind) is None
    wrong = codec.decode_difference(stored, memoryview(bytes(b ^ 1 for b in base)), len(data), kind)
    assert wrong is not None  # which is why the caller looks at the digest
    assert digest(wrong) != digest(data)
    assert codec.unpack(stored, kind, len(data), digest(data)) is None  # by itself it is nothing


@given(st.binary(max_size=400))
def test_what_is_no_link_is_refused(data: bytes) -> None:
    found = codec.link_of(memoryview(data))
    assert found is None or found.raw > 0


@pytest.mark.parametrize(
    "change",
    [{"attempt": "../../x"}, {"name": "../x"}, {"codec": 5}, {"codec": 9}, {"stored": 0}, {"raw": 1 << 40}, {"offset": -1},
     {"offset": 1 << 40}, {"digest": b"short"}],
)  # fmt: skip
def test_a_link_to_an_impossible_place_is_refused(change: dict[str, Any]) -> None:
    wrong = msgspec.structs.replace(link(100), **change)
    assert codec.link_of(memoryview(codec.encode_difference(bytes(100), bytes(100), wrong, 5))) is None


def test_a_decompression_bomb_is_refused_before_its_memory_is_taken() -> None:
    stored = memoryview(codec.encode_difference(bytes(32 * MIB), bytes(32 * MIB), link(4096), 5))
    assert len(stored) < 10_000
    assert codec.decode_difference(stored, memoryview(bytes(4096)), 4096, 5) is None


def test_a_difference_is_taken_where_it_pays_and_a_new_base_where_it_has_grown() -> None:
    planes, small, large = Sample(2, 0.7, 1 / 400e6), Sample(5, 0.12, 1 / 300e6), Sample(5, 0.5, 1 / 300e6)
    assert worth_delta(small, [planes])
    assert not worth_delta(large, [planes])
    assert decide([planes, small], 100e6, 2) == 5
    assert decide([planes, small], 2e9, 2) == RAW
    assert decide([planes, Sample(5, 0.12, 1 / 20e6)], 100e6, 2) == 2  # the base comes too slowly


class Run:
    """bf16 weights that training changes a little at each step, and noise, on a store that is said to be slow."""

    def __init__(self, url: Path, upload: float = 1e6, **options: Any) -> None:
        self.url, self.upload, self.options = str(url), upload, options
        torch.manual_seed(0)
        self.master = torch.randn(3 * MIB // 2) * 0.02
        self.noise = torch.randint(0, 256, (200_000,), dtype=torch.uint8)

    def state(self) -> dict[str, torch.Tensor]:
        return {"w": self.master.bfloat16(), "noise": self.noise.clone()}

    def train(self, rate: float = 1e-5) -> None:
        self.master += rate * torch.randn(self.master.shape)
        self.noise = torch.randint(0, 256, self.noise.shape, dtype=torch.uint8)

    def save(self, *steps: int, rate: float = 1e-5) -> list[SaveResult]:
        found = []
        with Checkpointer(self.url, run="exp", sidecar=None, compression="delta", **self.options) as checkpointer:
            checkpointer.restore({"noise": self.noise.clone()}, strict=False)  # goes on from there
            for step in steps:
                checkpointer._saver.upload_hint = self.upload
                found.append(checkpointer.save(step, self.state()).result(60))
                self.train(rate)
        return found

    def restore(self, step: int) -> dict[str, torch.Tensor]:
        into = {name: torch.zeros_like(tensor) for name, tensor in self.state().items()}
        with Checkpointer(self.url, run="exp", sidecar=None) as checkpointer:
            assert checkpointer.restore(into, step) == step
        return into


def manifests(run: Run, step: int) -> Manifest:
    with open_store(run.url) as store:
        base = repository.find(store, "exp", step)
        assert base is not None
        return open_step(store, "exp", base).manifests[0]


def test_hardly_changed_weights_are_stored_as_differences_from_one_base_and_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved = {1: run.state()}
    first, *_ = run.save(1)
    for step in (2, 3):
        saved[step] = run.state()
        (result,) = run.save(step)
        raw, stored = result.encodings["xor+planes2+zstd"]
        assert stored < 0.3 * raw
        assert result.bytes_written < 0.5 * first.bytes_written
    last, kinds = manifests(run, 3), [chunk.codec for chunk in manifests(run, 3).chunks]
    assert last.version == manifest.WITH_DELTAS
    assert {last.packs[last.chunks[base].pack].attempt for _, base in last.links} == {manifests(run, 1).attempt}
    assert len(last.links) == kinds.count(5) == 3
    for step, state in saved.items():
        found = run.restore(step)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    with open_store(run.url) as store:
        assert checking.check(store).clean


def test_what_leans_on_a_base_keeps_it_when_its_step_is_removed_and_is_leant_on_unchanged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    second = run.state()
    run.save(3, rate=0.0)
    run.noise = second["noise"]
    (again,) = run.save(4)
    assert again.bytes_written == 0  # the very chunks, with their base
    with open_store(run.url) as store:
        collect(store, {StepOfRun("exp", number, step) for number, step in ((1, 1), (1, 2), (2, 3))})
        assert checking.check(store).clean
    found = run.restore(4)
    assert all(torch.equal(found[name], tensor) for name, tensor in second.items())


def test_differences_that_have_grown_make_a_new_base(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    run.train(rate=1.0)
    (result,) = run.save(3)
    assert "xor+planes2+zstd" not in result.encodings
    (result,) = run.save(4)
    assert "xor+planes2+zstd" in result.encodings
    last = manifests(run, 4)
    assert {last.packs[last.chunks[base].pack].attempt for _, base in last.links} == {manifests(run, 3).attempt}


def test_on_a_fast_store_nothing_is_a_difference(tmp_path: Path) -> None:
    run = Run(tmp_path, upload=20e9)
    for result in run.save(1, 2):
        assert set(result.encodings) == {"raw"}
    assert manifests(run, 2).version == 1


def test_damage_of_a_base_is_found_and_named_and_the_next_save_does_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    step = manifests(run, 2)
    base = step.chunks[step.links[0][1]]
    pack = step.packs[base.pack].key
    flip(tmp_path / pack, base.offset + base.stored // 2)
    with pytest.raises(CorruptionError, match="tensor 'w'"):
        run.restore(2)
    assert f"the base of a chunk is damaged: {base.stored} bytes at offset {base.offset} of {pack}" in caplog.text
    with open_store(run.url) as store:
        found = {(p.object, f"offset {base.offset} " in p.what) for p in checking.check(store).problems}
    assert (pack, True) in found
    third = run.state()
    (result,) = run.save(3)  # other chunks may still lean on theirs
    after = run.restore(3)
    assert torch.equal(after["w"], third["w"])
    assert result.bytes_written > 0
    assert ckpt(["show", run.url, "--run", "exp", "--step", "2", "--json"]) == 0
    assert "xor+planes2+zstd" in json.loads(capsys.readouterr().out)["encodings"]


def test_a_reader_of_before_differences_refuses_them_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    monkeypatch.setattr(manifest, "NEWEST", 2)
    with pytest.raises(UnsupportedError, match=r"rank-00000\.manifest has format version 3"):
        manifests(run, 2)
    assert manifests(run, 1).version == 2


@pytest.mark.parametrize("links", [(), ((0, 0),), ((99, 0),), ((-1, 0),)])
def test_a_manifest_whose_links_are_wrong_is_refused(links: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    good = manifests(run, 2)
    key = f"runs/exp/{good.timeline:06d}/{2:012d}/{good.attempt}/rank-00000.manifest"
    manifest.decode(manifest.encode(good), key)
    with pytest.raises(CorruptionError, match="not a valid manifest"):
        manifest.decode(manifest.encode(msgspec.structs.replace(good, links=links)), key)


def test_a_worker_that_takes_over_stores_differences_once_more() -> None:
    from headrace.checkpoint.format.pack import Entry

    known, entries = KnownChunks(), (Entry(b"a" * 32, 0, 5, 9, RAW), Entry(b"b" * 32, 4096, 5, 9, 5))
    add_stored(known, {manifest.PackName("A", "0-0123abcd-0"): entries})
    assert set(known.chunks) == {b"a" * 32}


def test_the_samples_of_a_difference_count_the_time_to_read_its_base() -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32).tobytes()
    found = compression.measure_difference(memoryview(weights), memoryview(weights), 6, reading=4.0)
    assert found.ratio < 0.01
    assert found.seconds > 4.0 / len(weights)
