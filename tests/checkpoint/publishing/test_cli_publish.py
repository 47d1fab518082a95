"""`headrace ckpt publish` and `headrace ckpt published`."""

from __future__ import annotations

import json

import pytest
import torch

from headrace.checkpoint import Subscriber
from headrace.dataio.cli import main
from headrace.dataio.core.errors import CorruptionError
from tests.checkpoint.publishing.conftest import Trainer, empty_like, same


def test_a_step_is_published_and_listed(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(trainer.url)
    trainer.train()
    trainer.save()
    assert main(["ckpt", "published", url]) == 0
    assert capsys.readouterr().out == "nothing is published\n"
    assert main(["ckpt", "publish", url, "policy", "--run", "exp42", "--dtype", "bfloat16"]) == 0
    assert "policy  version 1" in capsys.readouterr().out
    held = empty_like(trainer.weights[1], torch.bfloat16)
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[1])
    assert (
        main(["ckpt", "publish", url, "policy", "--run", "exp42", "--step", "1", "--exclude", "model/0.*", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["exclude"] == ["model/0.*"]
    assert main(["ckpt", "published", url]) == 0
    assert "policy  version 2" in capsys.readouterr().out
    assert main(["ckpt", "published", url, "--run", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--step", "7"], 2, "no step 7"),
        (["--include", "nothing/*"], 2, "matches nothing"),
        (["--dtype", "int8"], 2, "floating-point"),
    ],
)
def test_mistakes_are_explained(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    trainer.train()
    trainer.save()
    assert main(["ckpt", "publish", str(trainer.url), "policy", "--run", "exp42", *words]) == code
    assert text in capsys.readouterr().err


def test_a_damaged_record_does_not_hide_other_names(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.next_version()
    damaged = trainer.url / "published" / "a" / "000000001.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    assert main(["ckpt", "published", str(trainer.url)]) == CorruptionError.exit_code
    out, err = capsys.readouterr()
    assert "policy  version 1" in out
    assert "a: " in err
