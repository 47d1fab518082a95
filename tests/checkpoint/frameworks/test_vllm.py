"""The engine of vLLM's weight transfer, called as a worker of vLLM calls it."""

from __future__ import annotations

import importlib
import inspect
import math
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.errors import CorruptionError, DeadlineError, UsageError
from tests.support import vllm_interface
from tests.support.waiting import wait_for

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
WIDTH = 64


class Fused(nn.Module):
    """Query, key and value in one parameter, as vLLM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 * WIDTH, WIDTH))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: Tensor, loaded_weight: Tensor, shard: int) -> None:
        param.data[shard * WIDTH : (shard + 1) * WIDTH].copy_(loaded_weight)


class Served(nn.Module):
    """A model that stores its weights in another form than the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Fused(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.calls: list[list[str]] = []
        self.fail_at = ""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.calls.append([])
        for name, tensor in weights:
            if name == self.fail_at:
                raise RuntimeError("out of memory")
            self.calls[-1].append(name)
            if name == "out":
                loader = getattr(self.out.weight, "weight_loader", lambda param, loaded: param.data.copy_(loaded))
                loader(self.out.weight, tensor)
            else:
                self.qkv.weight.weight_loader(self.qkv.weight, tensor, "qkv".index(name))  # type: ignore[attr-defined]
        return {"qkv.weight", "out.weight"}

    def holds(self, weights: dict[str, Tensor]) -> bool:
        fused = torch.cat([weights[name] for name in "qkv"])
        return torch.equal(self.qkv.weight, fused) and torch.equal(self.out.weight, weights["out"])


class Trainer:
    """Publishes versions in which only some tensors change."""

    def __init__(self, url: Path) -> None:
        self.checkpointer = Checkpointer(url, run="exp42", sidecar=None)
        self.weights = {name: torch.randn(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        self.versions: dict[int, dict[str, Tensor]] = {}

    def publish(self, *changed: str) -> int:
        self.weights |= {name: torch.randn(WIDTH, WIDTH) for name in changed}
        handle = self.checkpointer.save(len(self.versions) + 1, {"model": dict(self.weights)})
        future = self.checkpointer.publish("policy", handle)
        assert future is not None
        number = future.result(60).number
        self.versions[number] = dict(self.weights)
        return number


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    modules = vllm_interface.vllm_modules(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)  # needs an accelerator
    return modules


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    torch.manual_seed(0)
    trainer = Trainer(tmp_path / "repository")
    with trainer.checkpointer:
        yield trainer


class Worker:
    """Calls an engine as vLLM's worker does."""

    def __init__(self, vllm: SimpleNamespace, quantization: str | None = None) -> None:
        from headrace.checkpoint.frameworks import register_vllm

        register_vllm()
        register_vllm()  # vLLM may call plug-ins more than once
        self.model = Served()
        vllm.record_metadata_for_reloading(self.model)
        model_config = SimpleNamespace(quantization=quantization, dtype=torch.float32)
        self.engine: Any = vllm.WeightTransferEngineFactory.create_engine(
            SimpleNamespace(backend="headrace"),
            SimpleNamespace(parallel_config=None, model_config=model_config),
            torch.device("cpu"),
            self.model,
        )

    def init(self, url: Path, **options: Any) -> None:
        info = {"url": str(url), "name": "policy", "poll": 0.02, **options}
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def update(self, version: int, **options: Any) -> None:
        self.engine.start_weight_update()
        self.engine.update_weights({"version": version, **options})
        self.engine.finish_weight_update()


@pytest.fixture
def worker(vllm: SimpleNamespace, trainer: Trainer, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(vllm)
    yield worker
    worker.engine.shutdown()


def test_a_worker_loads_the_versions_that_the_trainer_names(worker: Worker, trainer: Trainer, tmp_path: Path) -> None:
    worker.init(tmp_path / "repository")
    worker.update(trainer.publish())
    assert worker.model.holds(trainer.versions[1])
    worker.update(trainer.publish("k"))
    assert worker.model.holds(trainer.versions[2])
    trainer.publish("q")
    trainer.publish("q", "out")
    worker.update(3)  # all workers load the version that is named, although there is a newer one
    assert worker.model.holds(trainer.versions[3])
    worker.update(1)
    assert worker.model.holds(trainer.versions[1])
    assert worker.model.calls == [["k", "out", "q", "v"]] * 4
    worker.update(1)
    assert len(worker.model.calls) == 4


def test_only_changed_tensors_are_loaded_in_place_if_that_is_asked_for(
    worker: Worker, trainer: Trainer, tmp_path: Path
) -> None:
    worker.init(tmp_path / "repository", changed_only=True)
    worker.update(trainer.publish())
    worker.update(trainer.publish("k", "out"))
    worker.update(trainer.publish("q"))
    assert worker.model.calls == [["k", "out", "q", "v"], ["k", "out"], ["q"]]
    assert worker.model.holds(trainer.versions[3])


def test_a_version_is_fetched_while_the_worker_serves(worker: Worker, trainer: Trainer, tmp_path: Path) -> None:
    worker.init(tmp_path / "repository")
    number = trainer.publish()
    copy = worker.engine._copy
    wait_for(lambda: copy.version is not None and copy.version.number == number)
    worker.update(number)
    number = trainer.publish("v")
    wait_for(lambda: copy._prepared is not None and copy._prepared[0].number == number)
    assert worker.model.holds(trainer.versions[1])
    for path in (tmp_path / "repository" / "published").rglob("update-*"):
        path.unlink()
    for path in (tmp_path / "repository" / "packs").rglob("*.pack"):
        path.unlink()
    worker.update(number)  # reads nothing
    assert worker.model.holds(trainer.versions[2])


@pytest.mark.parametrize("changed_only", [False, True])
def test_a_damaged_version_leaves_the_model_as_it_was(
    worker: Worker, trainer: Trainer, tmp_path: Path, changed_only: bool
) -> None:
    worker.init(tmp_path / "repository", changed_only=changed_only, poll=1000)
    worker.update(trainer.publish())
    number = trainer.publish("k")
    for path in (tmp_path / "repository" / "published").rglob("weights-*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptionError):
        worker.update(number)
    assert worker.model.holds(trainer.versions[1])
    worker.update(trainer.publish("q"))
    assert worker.model.holds(trainer.versions[3])


@pytest.mark.parametrize("changed_only", [False, True])
def test_after_a_load_that_failed_all_tensors_are_loaded_again(
    worker: Worker, trainer: Trainer, tmp_path: Path, changed_only: bool
) -> None:
    worker.init(tmp_path / "repository", changed_only=changed_only)
    worker.update(trainer.publish())
    worker.model.fail_at = "q"
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.update(trainer.publish("k", "q"))
    worker.model.fail_at = ""
    worker.update(2)
    assert worker.model.calls[-1] == ["k", "out", "q", "v"]
    assert worker.model.holds(trainer.versions[2])


def test_a_version_that_is_not_published_is_waited_for_so_long(
    worker: Worker, trainer: Trainer, tmp_path: Path
) -> None:
    worker.init(tmp_path / "repository")
    worker.update(trainer.publish())
    with pytest.raises(DeadlineError, match="version 7 of policy is not published"):
        worker.update(7, timeout=0.05)
    assert worker.model.holds(trainer.versions[1])


def test_requests_that_cannot_be_meant_are_refused(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="follows no published name"):
        worker.engine.start_weight_update()
    for wrong in ({"url": ""}, {"changed_only": 1}, {"name": "../x"}, {"poll": 0}, {"poll": math.inf}, {"poll": "1"}):
        with pytest.raises(UsageError):
            worker.init(**({"url": tmp_path} | wrong))
    with pytest.raises(ValueError, match="Invalid init_info"):
        worker.init(tmp_path, password="s")
    for values in ({"version": 0}, {"version": True}, {"version": 1, "timeout": 3601}, {"version": 1, "timeout": "1"}):
        with pytest.raises(UsageError):
            worker.engine.parse_update_info(values)
    with pytest.raises(ValueError, match="Invalid update_info"):
        worker.engine.parse_update_info({})


def test_quantized_models_are_loaded_whole(vllm: SimpleNamespace, tmp_path: Path) -> None:
    worker = Worker(vllm, quantization="fp8")
    with pytest.raises(UsageError, match="quantized"):
        worker.init(tmp_path, changed_only=True)


def test_the_package_names_the_plug_in_to_vllm() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, function = project["entry-points"]["vllm.general_plugins"]["headrace"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.skipif(not vllm_interface.is_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("path", sorted(vllm_interface.MODULES))
def test_the_recorded_interface_is_that_of_vllm(path: str) -> None:
    real = importlib.import_module(path)
    for member in vllm_interface.MODULES[path]:
        other = getattr(real, member.__name__)
        if inspect.isfunction(member):
            assert list(inspect.signature(member).parameters) == list(inspect.signature(other).parameters)
            continue
        for name, method in vars(member).items():
            if inspect.isroutine(getattr(member, name)) and not name.startswith("_abc"):
                found = inspect.signature(getattr(other, name)).parameters
                assert list(inspect.signature(getattr(member, name)).parameters) == list(found), (name, method)
        assert getattr(member, "__abstractmethods__", None) == getattr(other, "__abstractmethods__", None)
