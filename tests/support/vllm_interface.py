"""The part of vLLM that `headrace.checkpoint.frameworks.vllm` uses, for machines without vLLM.

The signatures are those of vLLM 0.33.0 (commit 4ba787ec9). A test compares them with the real ones where vLLM is installed
(`tests/checkpoint/frameworks/test_vllm.py`). `vllm_modules` gives the real modules there, and these ones elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024 - as vLLM's
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024 - as vLLM's
    pass


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    """What a worker of vLLM calls."""

    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]
    supports_draft_weight_update: bool = True
    defers_processing: bool = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def drain_pending(self) -> None: ...

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(f"Invalid init_info: {error}") from error

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        try:
            return self.update_info_cls(**update_dict)
        except TypeError as error:
            raise ValueError(f"Invalid update_info: {error}") from error

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        torch.accelerator.synchronize()

    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class WeightTransferEngineFactory:
    _registry: ClassVar[dict[str, Callable[[], type[Any]]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        assert class_name
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path_or_cls), class_name)

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


def record_metadata_for_reloading(model: torch.nn.Module) -> None:
    """vLLM's records the form of each layer."""


def initialize_layerwise_reload(model: torch.nn.Module) -> None:
    """vLLM's takes the parameters away, so that the model cannot serve before it was loaded."""
    model.kept = {name: value.clone() for name, value in model.named_parameters()}  # type: ignore[assignment]
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(float("nan"))


def finalize_layerwise_reload(*args: Any, **kwargs: Any) -> None:
    """vLLM's gives layers that nothing was loaded into their parameters back."""
    model = args[0]
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.isnan().all():
                value.copy_(model.kept[name])


MODULES = {
    "vllm.distributed.weight_transfer.base": (WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo),
    "vllm.distributed.weight_transfer.factory": (WeightTransferEngineFactory,),
    "vllm.model_executor.model_loader.reload": (
        record_metadata_for_reloading,
        initialize_layerwise_reload,
        finalize_layerwise_reload,
    ),
}


def is_installed() -> bool:
    """Whether the real vLLM is there."""
    return importlib.util.find_spec("vllm") is not None


def vllm_modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `MODULES` lists: vLLM's own where it is installed, else this module's, which take its place for a test."""
    if not is_installed():
        for path, members in MODULES.items():
            parts = path.split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                if name not in sys.modules:
                    monkeypatch.setitem(sys.modules, name, ModuleType(name))
            for member in members:
                monkeypatch.setattr(sys.modules[path], member.__name__, member, raising=False)
        monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
        monkeypatch.delitem(sys.modules, "headrace.checkpoint.frameworks.vllm", raising=False)
    found = {
        member.__name__: getattr(importlib.import_module(path), member.__name__)
        for path, members in MODULES.items()
        for member in members
    }
    return SimpleNamespace(**found)
