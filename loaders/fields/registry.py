"""The registry of fields, and fields from configuration files.

Purpose: a configuration file describes the fields of a loader by names: `{"field": "npy", "file": "latent.npy"}`.
Custom fields are registered under a name of their own. A new field of this package needs its name in `_BUILT_IN`.
Invariants: the module of a built-in field is imported when its name is first used.
Failure behaviour: `UsageError` for an unknown name or argument, with the name that may be meant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.suggestions import did_you_mean
from headrace.loaders.fields.base import Field

_BUILT_IN = {
    "audio": "headrace.loaders.fields.audio:Audio",
    "bytes": "headrace.loaders.fields.text:Bytes",
    "image": "headrace.loaders.fields.video:Image",
    "json": "headrace.loaders.fields.text:Json",
    "mask": "headrace.loaders.fields.pictures:Mask",
    "npy": "headrace.loaders.fields.arrays:Npy",
    "rows": "headrace.loaders.fields.rows:Rows",
    "safetensors": "headrace.loaders.fields.arrays:Safetensors",
    "text": "headrace.loaders.fields.text:Text",
    "video": "headrace.loaders.fields.video:Video",
}
"""The module and class of each field of this package."""
_KIND = "field"

_registered: dict[str, Callable[..., Field]] = {}


def register_field(name: str, cls: Callable[..., Field]) -> None:
    """Register a custom field for configuration files. It replaces a field with the same name.

    Call this before `field_from`, in every process that calls it.

    Args:
        name (str): the name in descriptions.
        cls (type[Field]): the class, or a function that returns a field. The description's other entries are its
            keyword arguments.

    Raises:
        UsageError: for an empty name, or a class that is not a `Field`.

    Example:
        >>> from functools import partial
        >>> from headrace.loaders.fields.arrays import Npy
        >>> register_field("latent", partial(Npy, "latent.npy", dtype="float16"))
        >>> field_from({"field": "latent", "required": False}).required
        False
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a field cannot have the name {name!r:.80}", hint='give a name, such as "points"')
    if not callable(cls) or (isinstance(cls, type) and not issubclass(cls, Field)):
        raise UsageError(f"{cls!r:.80} is not a field", hint="give a subclass of headrace.loaders.fields.base.Field")
    _registered[name] = cls


def field_names() -> list[str]:
    """The names of all fields, in order."""
    return sorted({*_BUILT_IN, *_registered})


def field_from(description: Mapping[str, object]) -> Field:
    """Create a field from its description in a configuration file.

    Args:
        description (Mapping[str, object]): the name of the field under "field", and its arguments by name.

    Returns:
        The field.

    Raises:
        UsageError: for an unknown name, and for unknown, missing or impossible arguments.

    Example:
        >>> field_from({"field": "npy", "file": "latent.npy", "dtype": "float16"})
        Npy(file='latent.npy', dtype='float16', collate='stack', required=True)
    """
    example = 'for example {"field": "npy", "file": "latent.npy"}'
    if not isinstance(description, Mapping) or not all(isinstance(name, str) for name in description):
        raise UsageError(f"{description!r:.200} does not describe a field", hint=f"give a mapping, {example}")
    name = description.get(_KIND)
    known = field_names()
    if not isinstance(name, str):
        raise UsageError(f"{dict(description)!r:.200} does not name its field", hint=example)
    if name not in known:
        raise UsageError(
            f"there is no field {name!r:.80}{did_you_mean(name, known)}", hint=f"there are {', '.join(known)}"
        )
    make = _registered.get(name) or _built_in(name)
    arguments = {argument: value for argument, value in description.items() if argument != _KIND}
    _check_arguments(name, make, arguments)
    return make(**arguments)


def _built_in(name: str) -> Callable[..., Field]:
    module, _, cls = _BUILT_IN[name].partition(":")
    with naming_extras():
        made: Callable[..., Field] = getattr(import_module(module), cls)
    return made


def _check_arguments(name: str, make: Callable[..., Field], arguments: Mapping[str, object]) -> None:
    parameters = inspect.signature(make).parameters.values()
    known = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for argument in arguments:
        if argument not in known and not open_ended:
            raise UsageError(
                f"the field {name!r} has no argument {argument!r:.80}{did_you_mean(argument, known)}",
                hint=f"it has {', '.join(known)}",
            )
    missing = [one.name for one in parameters if one.name in known and one.default is one.empty]
    for argument in missing:
        if argument not in arguments:
            raise UsageError(f"the field {name!r} needs the argument {argument!r}")
