"""What docs/howto/frameworks.md shows is run as it stands there, on a small dataset, with small models made here."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage

from headrace.dataio import pack
from headrace.loaders.loader import BaseLoader
from tests.support.lazy_modules import lazily
from tests.support.pictures import picture

transformers = lazily("transformers", needs="transformers")
lazily("accelerate", needs="accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "frameworks.md"
CLIP = '"openai/clip-vit-base-patch32"'
VIT = '"google/vit-base-patch16-224"'
COUNT = 24


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the dataset "pictures", which is also the current folder."""
    (media := tmp_path / "media").mkdir()
    for number in range(COUNT):
        (media / f"{number:02}.png").write_bytes(picture("png", 40 + 8 * (number % 3), 48))
        (media / f"{number:02}.json").write_text(json.dumps({"label": number % 2}))
        (media / f"{number:02}.txt").write_text(f"a picture with the number {number}")
    pack([media], tmp_path / "pictures", workers=1).close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    return tmp_path


def block(heading: str) -> str:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def run(code: str, bucket: Path, **scope: Any) -> dict[str, Any]:
    """Run a block with the dataset in `bucket`, and close its loader."""
    code = code.replace("s3://bucket", str(bucket))
    code = re.sub(r'(Loader\("[^"]*pictures", )16', r"\g<1>4", code)
    code = code.replace(VIT, repr(str(bucket / "vit"))).replace(CLIP, repr(str(bucket / "tokenizer")))
    try:
        exec(compile(code, PAGE.name, "exec"), scope)
    finally:
        if isinstance(loader := scope.get("loader"), BaseLoader):
            loader.close()
    return scope


def save_image_model(folder: Path) -> None:
    config = transformers.ViTConfig(
        image_size=224,
        patch_size=112,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        num_labels=2,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 24}).save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words = [f"a picture with the number {number}" for number in range(COUNT - 4)]
    made.train_from_iterator(words, tokenizers.trainers.WordLevelTrainer(special_tokens=["?", "_"]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", pad_token="_").save_pretrained(folder)


def test_the_block_of_transformers_trains_and_resumes(bucket: Path) -> None:
    save_image_model(bucket / "vit")
    code = block("transformers").replace(
        "save_steps=500", "save_steps=4, use_cpu=True, report_to=[], disable_tqdm=True"
    )
    first = run(code.replace("max_steps=10_000", "max_steps=4"), bucket)
    assert first["loader"].state_dict()["batch"] == 4
    resumed = code.replace("max_steps=10_000", "max_steps=8").replace(
        "trainer.train()", "trainer.train(resume_from_checkpoint=True)"
    )
    second = run(resumed, bucket)["trainer"]
    assert second.state.global_step == 8
    assert second.train_dataset.state_dict()["batch"] == 2  # of the second epoch


def test_the_block_of_accelerate_trains_and_resumes(bucket: Path) -> None:
    def parts() -> dict[str, Any]:
        model = torch.nn.Linear(3 * 64 * 64, 2)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        return {"model": model, "optimizer": optimizer, "loss_of": torch.nn.functional.cross_entropy}

    code = block("Accelerate").replace("Accelerator()", "Accelerator(cpu=True)")
    stopped = code + '    if loader.state_dict()["batch"] == 2:\n        break\n'
    assert run(stopped, bucket, **parts())["loader"].state_dict()["batch"] == 2
    seen = run(code.replace("    loss =", '    seen.append(batch["key"])\n    loss ='), bucket, **parts(), seen=[])[
        "seen"
    ]
    assert len(seen) == COUNT // 4 - 2


def test_the_block_of_torchdata_keeps_the_state(bucket: Path) -> None:
    scope = run(block("DataLoader and StatefulDataLoader"), bucket)
    assert scope["loader"].state_dict()["batch"] == 1
    assert scope["batch"]["image"].shape == (4, 3, 64, 64)


def test_processors_and_tokenizers_give_what_they_make_of_the_files(bucket: Path) -> None:
    save_image_model(bucket / "vit")
    save_tokenizer(bucket / "tokenizer")
    code = block("Processors and tokenizers of transformers")
    scope = run(code.replace("transform=encode", "transform=encode, num_threads=4"), bucket)
    batch, tokenizer, processor = scope["batch"], scope["tokenizer"], scope["processor"]
    assert batch["pixel_values"].shape == (4, 3, 32, 24)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 32)
    for position, key in enumerate(batch["key"]):
        number = int(key)
        pixels = PillowImage.open(io.BytesIO(picture("png", 40 + 8 * (number % 3), 48))).convert("RGB")
        expected = processor(images=np.asarray(pixels), return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(batch["pixel_values"][position], expected, rtol=0, atol=0)
        text = tokenizer.decode(batch["input_ids"][position][batch["attention_mask"][position].bool()])
        assert text.startswith("a picture with the number")
