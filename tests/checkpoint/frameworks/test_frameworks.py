"""The adapters under the real frameworks; skipped where one is not installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from headrace.checkpoint import Checkpointer, read
from headrace.dataio.core.errors import CorruptionError, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the frameworks' own


def framework(name: str) -> ModuleType:
    """The real package; skips with the reason where it is not installed."""
    pytest.importorskip(name, reason=f"{name} is not installed: pip install -c constraints.txt {name}")
    return importlib.import_module(f"headrace.checkpoint.frameworks.{name}")


def test_lightning_trains_on_from_a_checkpoint_in_the_repository(tmp_path: Path) -> None:
    ours = framework("lightning")
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    rows: Any = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(rows, batch_size=4)

    def trained(steps: int, resume: str | None, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        module = Module()
        plugin = ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None)
        trainer = L.Trainer(
            max_steps=steps, plugins=[plugin], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(tmp_path / "names" / "a.ckpt")
            trainer.save_checkpoint(tmp_path / "names" / "last.ckpt")
        plugin.close()
        return trainer, module

    _, first = trained(6, None, 0)
    assert (tmp_path / "names" / "last.ckpt").stat().st_size < 200  # a name, not a checkpoint
    resumed, same = trained(6, str(tmp_path / "names" / "last.ckpt"), 5)  # nothing left to train
    assert torch.equal(same.layer.weight, first.layer.weight)
    resumed, module = trained(8, str(tmp_path / "names" / "a.ckpt"), 5)
    assert resumed.global_step == 8
    assert not torch.equal(module.layer.weight, first.layer.weight)
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [6, 7]  # the first time that one `global_step` is saved twice


def test_a_name_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    ours = framework("lightning")
    plugin = ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None)
    (tmp_path / "bad.ckpt").write_text("[]")
    with pytest.raises(CorruptionError, match="does not name a step"):
        plugin.load_checkpoint(tmp_path / "bad.ckpt")
    with pytest.raises(FileNotFoundError, match="no checkpoint named"):
        plugin.load_checkpoint(tmp_path / "absent.ckpt")
    (tmp_path / "gone.ckpt").write_text('{"headrace-step": 3}\n')  # as the first version wrote them
    with pytest.raises(FileNotFoundError, match="names step 3 of run exp, which cannot be restored"):
        plugin.load_checkpoint(tmp_path / "gone.ckpt")
    with pytest.raises(UsageError, match="not a path of this machine's file system"):
        plugin.save_checkpoint({"global_step": 1}, "s3://bucket/a.ckpt")
    plugin.close()


def test_each_call_of_lightnings_save_keeps_what_it_was_given(tmp_path: Path) -> None:
    """Weights alone, then all; weights that were changed since; the same weights with other values."""
    ours = framework("lightning")
    plugin, weights = ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None), torch.ones(50_000)

    def save(name: str, **values: Any) -> None:
        plugin.save_checkpoint({"global_step": 4, "state_dict": {"w": weights}, **values}, tmp_path / name)

    def load(name: str) -> Any:
        return plugin.load_checkpoint(tmp_path / name)

    save("weights.ckpt")
    save("full.ckpt", optimizer_states=[{"m": torch.arange(6)}])
    save("last.ckpt", optimizer_states=[{"m": torch.arange(6)}], callbacks={"last": "last.ckpt", "k": (1, None)})
    weights.data.mul_(3)  # no version counter tells
    save("changed.ckpt")
    save("same.ckpt", callbacks={"n": 2})
    plugin.teardown()
    assert "optimizer_states" not in load("weights.ckpt")
    assert load("full.ckpt")["optimizer_states"][0]["m"].tolist() == [0, 1, 2, 3, 4, 5]
    assert load("last.ckpt")["callbacks"] == {"last": "last.ckpt", "k": (1, None)}
    assert torch.equal(load("last.ckpt")["optimizer_states"][0]["m"], torch.arange(6))
    assert load("last.ckpt")["state_dict"]["w"].unique().tolist() == [1]
    assert load("changed.ckpt")["state_dict"]["w"].unique().tolist() == [3]
    assert "callbacks" not in load("changed.ckpt")
    assert load("same.ckpt")["callbacks"] == {"n": 2}
    plugin.close()
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [4, 5, 6]  # "last" and "same" share the tensors of another name's step


def test_what_is_saved_again_under_a_framework_replaces_what_was_there(tmp_path: Path) -> None:
    """As their files do: Accelerate's folder, and a second training by the same plugin of Lightning."""
    ours = framework("accelerate")
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), nn.Linear(2, 1)
    accelerator.prepare(net)
    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
        ours.attach(accelerator, checkpointer)
        for value in (1.0, 2.0, 3.0):
            net.weight.data.fill_(value)
            for step in (1, 2):
                accelerator.save_state(str(tmp_path / f"step_{step}"))
        net.weight.data.fill_(0)
        accelerator.load_state(str(tmp_path / "step_1"))
        assert net.weight.unique().tolist() == [3]
        assert checkpointer.steps() == [1, 2]
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".step")]

    lightning = framework("lightning")
    plugin = lightning.RepositoryIO(str(tmp_path / "repo"), run="other", sidecar=None)
    for value in (1, 2):
        for step in (2, 4):
            plugin.save_checkpoint({"global_step": step, "value": value}, tmp_path / f"{step}.ckpt")
    plugin.teardown()
    for step in (2, 4):
        assert plugin.load_checkpoint(tmp_path / f"{step}.ckpt")["value"] == 2
    plugin.close()


def test_lightnings_load_from_checkpoint_reads_a_name(tmp_path: Path) -> None:
    ours = framework("lightning")
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 1)

    module, plugin = Module(5), ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None)
    trainer = L.Trainer(plugins=[plugin], accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    trainer.strategy._checkpoint_io = L.fabric.plugins.TorchCheckpointIO()
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    for name in ("ours.ckpt", "stock.ckpt"):
        loaded = Module.load_from_checkpoint(tmp_path / name)
        assert torch.equal(loaded.layer.weight, module.layer.weight)
    plugin.close()
    with pytest.raises(UsageError, match=r"names step 0 of run exp, but this process has no RepositoryIO"):
        Module.load_from_checkpoint(tmp_path / "ours.ckpt")


def test_a_link_to_the_last_checkpoint_leads_to_a_committed_one(tmp_path: Path) -> None:
    """`ModelCheckpoint(save_last="link")` moves its link as soon as saving returns."""
    ours = framework("lightning")
    plugin = ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None)
    for step in (1, 2):
        plugin.save_checkpoint({"global_step": step}, tmp_path / f"{step}.ckpt")
        assert step == 1 or (tmp_path / "2.ckpt").exists()
        (tmp_path / "last.ckpt").unlink(missing_ok=True)
        (tmp_path / "last.ckpt").symlink_to(f"{step}.ckpt")
    assert plugin.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2
    plugin.close()


def test_a_transformers_trainer_goes_on_where_it_saved(tmp_path: Path) -> None:
    ours = framework("transformers")
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": 3.0 + 0.0 * self.layer(x).mean()}

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"x": torch.full((4,), float(i))}

    def trained(steps: int) -> tuple[Any, Any]:
        model = Model()
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=steps,
            save_steps=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
            trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[ours.RepositoryCallback(checkpointer)])
            trainer.train()
        with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            assert losses == [3.0] * len(losses), "the first one after a restore too"
            return len(losses), checkpointer.steps()

    assert trained(4) == (4, [2, 4])
    assert trained(7) == (3, [2, 4, 6, 7])


def test_a_repository_trainer_resumes_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Dropout, shuffled data, a schedule, and a stop within an epoch: the weights are the same to the bit."""
    ours = framework("transformers")
    from transformers import TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).square().mean()}

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"x": torch.full((4,), i / 40)}

    def trained(out: str, steps: int, resume: bool) -> dict[str, torch.Tensor]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / out),
            max_steps=9,  # the schedule is for so many
            save_steps=3,
            save_total_limit=2,
            per_device_train_batch_size=8,  # five steps are an epoch
            warmup_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
        )
        with Checkpointer(str(tmp_path / out / "repo"), run="exp", sidecar=None) as checkpointer:
            torch.manual_seed(99 if resume else 1)
            model = Model()
            trainer = ours.RepositoryTrainer(model, arguments, train_dataset=Rows(), checkpointer=checkpointer)
            if steps < 9:
                trainer.add_callback(Stop(steps))
            trainer.train(resume_from_checkpoint=resume or None)
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = state.global_step >= self.step

    straight = trained("straight", 9, False)
    trained("stopped", 6, False)
    resumed = trained("stopped", 9, True)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    folder = tmp_path / "stopped" / "checkpoint-9"
    assert sorted(path.name for path in folder.iterdir()) == ["headrace-step.json", "trainer_state.json"]
    assert sorted(path.name for path in folder.parent.iterdir() if path.name != "repo") == [
        "checkpoint-6",
        "checkpoint-9",
    ]
    with Checkpointer(str(tmp_path / "stopped" / "repo"), run="exp", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [3, 6, 9]


class Counter:
    """What users register with Accelerate."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_accelerate_keeps_its_whole_state_in_the_repository(tmp_path: Path) -> None:
    ours = framework("accelerate")
    from accelerate import Accelerator

    def made(checkpointer: Checkpointer, seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        accelerator, net = Accelerator(cpu=True), nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        ours.attach(accelerator, checkpointer)
        return accelerator, model, optimizer, schedule, counter

    def step(parts: tuple[Any, ...]) -> float:
        accelerator, model, optimizer, schedule, counter = parts
        loss = model(torch.ones(8, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.count += 1
        return float(loss)

    with Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer:
        first = made(checkpointer, 1)
        step(first)
        folder = str(tmp_path / "step_12")
        first[0].save_state(folder, metadata={"loss": 2.5})
        saving = checkpointer.last_save_of(12)
        assert saving is not None
        saving.result(60)  # the folder is there when the step is
        left = sorted(path.name for path in (tmp_path / "step_12").iterdir())
        assert left == ["headrace-step.json", "random_states_0.pkl"]
        with read(str(tmp_path / "repo"), run="exp", step=12) as saved:
            assert saved.metadata == {"loss": 2.5}
        with pytest.raises(UsageError, match=r"value\.item\(\)"):
            first[0].save_state(str(tmp_path / "step_13"), metadata={"loss": torch.ones(1)})
        assert len(first[0]._optimizers) == len(first[0]._schedulers) == len(first[0]._custom_objects) == 1
        straight = [step(first) for _ in range(3)]  # with dropout: the generators must be the same too
        second = made(checkpointer, 2)
        second[0].load_state(folder)
        assert second[4].count == 1
        assert second[3].get_last_lr() == [0.05]
        assert [step(second) for _ in range(3)] == straight
        assert checkpointer.steps() == [12]
        with pytest.raises(UsageError, match="names no step"):
            first[0].save_state(str(tmp_path / "latest"))
        assert len(first[0]._optimizers) == 1


def test_map_location_moves_what_shares_memory_together() -> None:
    from headrace.checkpoint.frameworks.lightning import mapped

    base = torch.arange(6.0)
    state = {"a": base, "b": [base[2:5]], "n": 3, "t": (base.view(2, 3),)}
    assert mapped(state, None) is state
    same = mapped(state, "cpu")
    assert same["a"].data_ptr() == base.data_ptr()
    assert mapped(state, lambda storage, where: storage)["b"][0].data_ptr() == base[2:5].data_ptr()
    meta = mapped(state, {"cpu": "meta"})
    assert meta["a"].device.type == meta["b"][0].device.type == "meta"
    assert meta["b"][0].shape == (3,)
    assert (
        meta["a"].untyped_storage()._cdata
        == meta["t"][0].untyped_storage()._cdata
        == meta["b"][0].untyped_storage()._cdata
    )

    def cloned(storage: torch.UntypedStorage, where: str) -> torch.UntypedStorage:
        assert where == "cpu"
        return storage.clone()

    copied = mapped(state, cloned)
    copied["a"][2] = 99
    assert copied["b"][0][0] == copied["t"][0][0, 2] == 99
    assert base[2] == 2


def test_lightning_gets_the_checkpoint_where_it_asks_for_it(tmp_path: Path) -> None:
    ours = framework("lightning")
    plugin = ours.RepositoryIO(str(tmp_path / "repo"), run="exp", sidecar=None)
    plugin.save_checkpoint({"global_step": 1, "state_dict": {"w": torch.ones(3)}}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["w"].device.type == "cpu"
    moved = plugin.load_checkpoint(tmp_path / "a.ckpt", map_location=torch.device("meta"))
    assert moved["state_dict"]["w"].device.type == "meta"
    plugin.close()
