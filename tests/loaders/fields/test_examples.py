"""The examples in the docstrings of the fields run."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
from types import ModuleType

import pytest

from headrace.loaders.fields import arrays, pictures, registry, text
from headrace.loaders.fields.base import Field

FIELDS = [arrays.Npy, arrays.Safetensors, text.Text, text.Json, text.Bytes, pictures.Mask]


@pytest.mark.parametrize("module", [arrays, text, pictures, registry])
def test_the_examples_of_a_module_run(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})  # what an example adds is forgotten
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("field", FIELDS)
def test_every_argument_of_a_field_is_documented_once_in_order(field: type[Field]) -> None:
    shown = list(inspect.signature(field).parameters)
    documented = re.findall(r"^        (\w+) \(.*\): ", field.__doc__ or "", re.M)
    assert documented == shown or set(documented) == set(shown), documented
    assert ">>> " in (field.__doc__ or "")
    assert dataclasses.fields(field)  # type: ignore[arg-type]
