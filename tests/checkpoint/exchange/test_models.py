"""Models of transformers in tiny configurations: save, export, load by the format's own library, import, restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headrace.checkpoint import Checkpointer, export, import_checkpoint
from tests.support.lazy_modules import lazily

transformers = lazily("transformers", needs="transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32)
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
            tie_word_embeddings=True,
        )
    ).bfloat16()


def whisper() -> Any:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=100,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=20,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def vit() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=16,
        )
    )


RENAMED = {
    "vit.encoder.layer.*.attention.attention.query.*": "vit.layers.*.attention.q_proj.*",
    "vit.encoder.layer.*.attention.attention.key.*": "vit.layers.*.attention.k_proj.*",
    "vit.encoder.layer.*.attention.attention.value.*": "vit.layers.*.attention.v_proj.*",
    "vit.encoder.layer.*.attention.output.dense.*": "vit.layers.*.attention.o_proj.*",
    "vit.encoder.layer.*.intermediate.dense.*": "vit.layers.*.mlp.fc1.*",
    "vit.encoder.layer.*.output.dense.*": "vit.layers.*.mlp.fc2.*",
    "vit.encoder.layer.": "vit.layers.",
}
"""transformers 5 writes ViT with the names of its earlier releases, and renames the tensors when it loads them."""
MODELS = {"gpt2": gpt2, "llama": llama, "whisper": whisper, "vit": vit}


def same(one: Any, two: Any) -> bool:
    states = one.state_dict(), two.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def restored(repository: Path, run: str, make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    model = make()
    with Checkpointer(repository, run=run, sidecar=None) as checkpointer:
        assert checkpointer.restore({"model": model}) == 0
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_in_every_format_and_back(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    make, repository = MODELS[name], tmp_path / "r"
    model = make()
    with Checkpointer(repository, run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"model": model, "epoch": 3}).result(60)

    export(repository, tmp_path / "hf", run="exp", max_shard_size=20_000)
    model.config.save_pretrained(tmp_path / "hf")
    assert same(model, type(model).from_pretrained(tmp_path / "hf", dtype="auto"))

    export(repository, tmp_path / "m.pt", run="exp", format="torch")
    loaded = make()
    loaded.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True)["model"])
    assert same(model, loaded)

    export(repository, tmp_path / "dcp", run="exp", format="dcp")
    loaded = make()
    dcp.load({"model": loaded.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(model, loaded)

    for run, source in (("hf", tmp_path / "hf"), ("torch", tmp_path / "m.pt")):
        import_checkpoint(source, repository, run=run, base="exp")
    assert same(model, restored(repository, "hf", make))
    with Checkpointer(repository, run="torch", sidecar=None) as checkpointer:
        state = {"model": make(), "epoch": 0}
        checkpointer.restore(state)
    assert same(model, state["model"])
    assert state["epoch"] == 3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [False, True])
def test_a_folder_of_save_pretrained_is_restored(tmp_path: Path, name: str, shards: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB" if shards else "1GB")
    import_checkpoint(tmp_path / "hub", tmp_path / "r", run="exp", rename=RENAMED if name == "vit" else None)
    assert same(model, restored(tmp_path / "r", "exp", MODELS[name]))


@pytest.mark.parametrize("shards", [False, True])
def test_a_variant_that_transformers_saved_is_imported(tmp_path: Path, shards: bool) -> None:
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(tmp_path / "m", variant="fp16", max_shard_size="20KB" if shards else "1GB")
    assert (tmp_path / "m" / ("model.safetensors.index.fp16.json" if shards else "model.fp16.safetensors")).exists()
    import_checkpoint(tmp_path / "m", tmp_path / "r", run="exp")
    assert same(model, restored(tmp_path / "r", "exp", llama))
