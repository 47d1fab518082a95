"""Encodings of chunks: exact, bounded, chosen by what pays, refused by name where they are not known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import codec, manifest, pack
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.manifest import PLANES, RAW, ZSTD
from headrace.checkpoint.repository import check as checking
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import open_step
from headrace.checkpoint.saving import compression
from headrace.checkpoint.saving.compression import Sample, UploadSpeed, decide
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped, flip


@given(st.binary(min_size=1, max_size=5000), st.sampled_from([ZSTD, *PLANES]))
def test_every_codec_gives_back_the_very_bytes(data: bytes, kind: int) -> None:
    stored = memoryview(codec.compress(data, kind))
    out = codec.unpack(stored, kind, len(data), digest(data))
    assert out is not None
    assert bytes(out) == data


@given(st.binary(min_size=64, max_size=600), st.integers(0), st.integers(0, 7), st.sampled_from([ZSTD, *PLANES]))
def test_a_flipped_bit_never_comes_back_as_bytes(data: bytes, at: int, bit: int, kind: int) -> None:
    stored = bytearray(codec.compress(data, kind))
    stored[at % len(stored)] ^= 1 << bit
    out = codec.unpack(memoryview(stored), kind, len(data), digest(data))
    assert out is None or bytes(out) == data  # a bit that no decoder looks at


@pytest.mark.parametrize("kind", [ZSTD, *PLANES])
def test_a_decompression_bomb_is_refused_before_its_memory_is_taken(kind: int) -> None:
    bomb = codec.compress(bytes(64 * MIB), ZSTD)
    assert len(bomb) < 10_000
    assert codec.unpack(memoryview(bomb), kind, 4096, digest(bytes(4096))) is None


def test_planes_beat_zstd_alone_on_weights() -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, 1 << 18).astype(np.float32)
    plain, planes = codec.compress(weights.data, ZSTD), codec.compress(weights.data, 3)
    assert len(planes) < 0.95 * len(plain)
    assert len(planes) < 0.9 * weights.nbytes


SAMPLES = [Sample(ZSTD, 0.93, 1 / 900e6), Sample(3, 0.85, 1 / 590e6)]


def test_what_is_stored_faster_raw_is_stored_raw() -> None:
    assert decide(SAMPLES, None, 2) == RAW
    assert decide(SAMPLES, 2e9, 2) == RAW
    assert decide(SAMPLES, 100e6, 2) == 3
    assert decide([Sample(3, 0.99, 1e-12)], 1e6, 2) == RAW
    assert decide([Sample(3, 0.85, 1 / 20e6)], 100e6, 2) == RAW  # too slow a processor


@given(st.floats(1e5, 1e11), st.floats(0.05, 1.2), st.floats(1e-11, 1e-6), st.integers(1, 8))
def test_a_choice_never_makes_the_save_later(upload: float, ratio: float, seconds: float, threads: int) -> None:
    chosen = decide([Sample(3, ratio, seconds)], upload, threads)
    if chosen != RAW:
        assert max(seconds / threads, ratio / upload) < max(1 / upload, compression._HASH_SECONDS / threads)


def test_the_stores_own_buffers_do_not_count_as_its_speed() -> None:
    upload = UploadSpeed()
    upload.took(40 * MIB, 0.001)
    assert upload.speed is None
    upload.took(60 * MIB, 0.999)
    assert upload.speed == pytest.approx(100 * MIB)
    assert UploadSpeed(5e6).speed == 5e6


class Narrow(Wrapped):
    """A store that takes `rate` bytes a second."""

    rate = 40e6

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        def slowly() -> Iterable[Buffer]:
            for part in parts:
                time.sleep(len(part) / self.rate)
                yield part

        return super().put_multipart(key, slowly())


def state(seed: int, mib: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    n = mib * MIB // 4 // 4
    return {
        "fp32": torch.randn(n) * 0.02,
        "bf16": (torch.randn(2 * n) * 0.02).bfloat16(),
        "noise": torch.randint(0, 256, (4 * n,), dtype=torch.uint8),
        "second": torch.randn(n) * 0.02,
    }


@pytest.mark.slow
def test_on_a_slow_store_what_pays_is_encoded_and_noise_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = state(1, 80)
    with open_store(tmp_path) as inner:
        with Checkpointer(Narrow(inner), run="exp", sidecar=None, compression="auto") as checkpointer:
            result = checkpointer.save(1, saved).result(120)
            again = checkpointer.save(2, state(2, 24)).result(120)  # knows the store from the first
            into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
            assert checkpointer.restore(into, 1) == 1
        assert all(torch.equal(into[name], saved[name]) for name in saved)
        assert result.encodings["raw"][0] >= 48 * MIB  # until the speed was known, and the noise
        for name in set(result.encodings) - {"raw"}:
            raw, stored = result.encodings[name]
            assert stored < 0.93 * raw
        assert set(again.encodings) == {"raw", "planes2+zstd", "planes4+zstd"}
        assert again.bytes_written < 0.9 * again.bytes_state
        assert checking.check(inner).clean
    capsys.readouterr()
    assert ckpt(["show", str(tmp_path), "--run", "exp", "--step", "2", "--tensors", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {t["name"]: t["codecs"] for t in shown["tensors"]}["noise"] == ["raw"]
    assert {t["name"]: t["codecs"] for t in shown["tensors"]}["bf16"] == ["planes2+zstd"]
    assert ckpt(["show", str(tmp_path), "--run", "exp"]) == 0
    assert "planes4+zstd: " in capsys.readouterr().out


def test_on_a_fast_store_everything_is_raw_and_readable_by_the_first_version(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, compression="auto") as checkpointer:
        result = checkpointer.save(1, {"w": torch.randn(1_000_000)}).result(60)
    assert set(result.encodings) == {"raw"}
    with open_store(tmp_path) as store:
        base = repository.find(store, "exp", "latest")
        assert base is not None
        assert open_step(store, "exp", base).manifests[0].version == 1


def narrow_step(tmp_path: Path) -> str:
    """A step with planes; the key of its only pack."""
    with open_store(tmp_path) as store:
        with Checkpointer(Narrow(store), run="exp", sidecar=None, compression="auto") as checkpointer:
            checkpointer._saver.upload_hint = 1e4  # so slow that even a busy processor is faster
            generator = torch.Generator().manual_seed(0)
            result = checkpointer.save(1, {"w": torch.randn(300_000, generator=generator)}).result(60)
            assert "planes4+zstd" in result.encodings
        (found,) = [info.key for info in store.list("packs/")]
    return found


def test_a_reader_of_the_first_version_refuses_planes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = narrow_step(tmp_path)
    monkeypatch.setattr(manifest, "NEWEST", 1)
    monkeypatch.setattr(pack, "NEWEST", 1)
    with open_store(tmp_path) as store:
        with pytest.raises(UnsupportedError, match=r"format version 2.*install a newer Headrace"):
            pack.read_table(store, key)
        base = repository.find(store, "exp", "latest")
        assert base is not None
        with pytest.raises(UnsupportedError, match=r"rank-00000.manifest has format version 2"):
            open_step(store, "exp", base)


def test_damage_of_an_encoded_chunk_is_found_and_named(tmp_path: Path) -> None:
    key = narrow_step(tmp_path)
    flip(tmp_path / key, 5000)
    with (
        Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer,
        pytest.raises(CorruptionError, match="tensor 'w'"),
    ):
        checkpointer.restore({"w": torch.zeros(300_000)})
    with open_store(tmp_path) as store:
        assert not checking.check(store).clean


def test_a_manifest_with_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    narrow_step(tmp_path)
    with open_store(tmp_path) as store:
        base = repository.find(store, "exp", "latest")
        assert base is not None
        found = open_step(store, "exp", base).manifests[0]
        wrong = msgspec.structs.replace(found, chunks=(msgspec.structs.replace(found.chunks[0], codec=99),))
        key = f"runs/exp/000001/{1:012d}/{base.attempt}/rank-00000.manifest"
        with pytest.raises(CorruptionError, match="unknown codec 99"):
            manifest.decode(manifest.encode(wrong), key)
