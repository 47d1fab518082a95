"""The entries of a step: which of them are exported, and under which names.

The state of a step is a tree. Its leaves are tensors, and values. Lists are leaves as well, for formats that keep
values. A leaf has a path, such as "model/embed.weight".

- `contents` joins the trees of all ranks. An entry that several ranks have is that of the given rank.
- `selected` keeps the leaves that the patterns choose. The patterns are those of `restore`.
- `nested` builds a dict again, for formats that keep the structure.
- `flat` gives each tensor one name, for formats that do not.

Invariant: two entries never get the same name. Nothing is read except manifests.
Failure behaviour: `UsageError` for a pattern or a rule without a match, and for names that collide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import dcp_names
from headrace.checkpoint.restoring.chunk_reader import Saved
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.fit import Selection
from headrace.checkpoint.state.tensors import MODULE
from headrace.checkpoint.state.tree import MetaNode, PartsNode, StatefulNode, TensorRef, ValueNode, ViewRef, join
from headrace.dataio.core.errors import CorruptionError, UsageError

Rename = Mapping[str, str] | Callable[[str], str] | None
Keys = tuple[Any, ...]
_PATTERN_HINT = "`headrace ckpt show URL --run RUN --tensors` lists the tensors of a step by path"


@dataclass(frozen=True, slots=True)
class Leaf:
    """An entry at `path`. `keys` lead to it from the top of the state."""

    path: str
    keys: Keys
    node: object


@dataclass(frozen=True, slots=True)
class Contents:
    """A step's state as one rank sees it, and all tensors by their names in the manifests.

    `modules`: the paths of the modules in the state.
    """

    root: dict[Any, Any]
    tensors: Mapping[str, Saved]
    modules: tuple[str, ...] = ()

    def saved(self, name: str) -> Saved:
        """The tensor of this name."""
        if name not in self.tensors:
            raise CorruptionError(
                f"the checkpoint refers to tensor {name!r:.200}, which it does not hold",
                hint="run `headrace ckpt check`",
            )
        return self.tensors[name]


def contents(step: Step, rank: int) -> Contents:
    """The state of a step, joined from the trees of all ranks."""
    number = rank if rank < len(step.manifests) else 0
    root: Any = tree.decode(step.manifests[number].tree)
    if dcp_names.is_dcp(root):
        return Contents(*dcp_names.state_of(step, number))
    for manifest in step.manifests:
        if manifest.rank != number:
            root = _joined(root, tree.decode(manifest.tree))
    if not isinstance(root, dict):
        raise CorruptionError("the step's state is not a dict", hint="run `headrace ckpt check`")
    return Contents(_plain(root), dcp_names.all_tensors(step, number), tuple(_modules(root, "")))


def _joined(first: Any, second: Any) -> Any:
    """`first` with the entries that only `second` has."""
    if isinstance(first, StatefulNode) and isinstance(second, StatefulNode):
        return StatefulNode(first.kind, _joined(first.state, second.state))
    if isinstance(first, dict) and isinstance(second, dict):
        both = {key: _joined(value, second[key]) if key in second else value for key, value in first.items()}
        return both | {key: value for key, value in second.items() if key not in first}
    return first


def _modules(node: object, path: str) -> Iterator[str]:
    if isinstance(node, StatefulNode):
        if node.kind == MODULE:
            yield path
        else:
            yield from _modules(node.state, path)
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _modules(value, join(path, key))


def _plain(node: Any) -> Any:
    """The tree with the states of objects in place of the objects."""
    if isinstance(node, StatefulNode):
        return _plain(node.state)
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_plain(value) for value in node)
    return node


def leaves(node: object, *, lists: bool, path: str = "", keys: Keys = ()) -> Iterator[Leaf]:
    """The leaves of a tree. With `lists`, a list is cut into its entries; otherwise it is one leaf."""
    if isinstance(node, dict) and node:
        items: Iterable[tuple[Any, object]] = node.items()
    elif lists and isinstance(node, (list, tuple)) and node:
        items = enumerate(node)
    elif lists and isinstance(node, ValueNode) and any(True for _ in tree.tensor_names(node)):
        yield from leaves(node.value, lists=lists, path=path, keys=keys)
        return
    else:
        yield Leaf(path, keys, node)
        return
    for key, value in items:
        yield from leaves(value, lists=lists, path=join(path, key), keys=(*keys, key))


def selected(found: Iterable[Leaf], include: str | Iterable[str] | None, exclude: str | Iterable[str]) -> list[Leaf]:
    """The leaves that the patterns choose."""
    selection = Selection.of(include, exclude, strict=True, cast=False)
    chosen = [leaf for leaf in found if selection.selects(leaf.path)]
    require_matches(selection)
    if not chosen:
        raise UsageError("the patterns choose no entry of the step", hint=_PATTERN_HINT)
    return chosen


def require_matches(selection: Selection, hint: str = _PATTERN_HINT) -> None:
    """Raise `UsageError` for patterns that matched no entry."""
    for argument, patterns in selection.unmatched.items():
        raise UsageError(f"{argument} has patterns without a match: {', '.join(map(repr, patterns[:8]))}", hint=hint)


@dataclass(slots=True)
class Renaming:
    """Applies the rules of `rename`. A rule without a match is an error in the end."""

    rename: Rename
    _used: set[str] = field(default_factory=set)

    def of(self, name: str) -> str:
        """The new name. The first rule that matches counts."""
        if self.rename is None:
            return name
        if callable(self.rename):
            return _text(self.rename(name), name)
        for pattern, replacement in self.rename.items():
            if (new := _apply(pattern, replacement, name)) is not None:
                self._used.add(pattern)
                return new
        return name

    def require_used(self) -> None:
        """Raise `UsageError` for rules that matched nothing."""
        unused = [] if self.rename is None or callable(self.rename) else [p for p in self.rename if p not in self._used]
        if unused:
            raise UsageError(
                f"rename has rules without a match: {', '.join(map(repr, unused[:8]))}",
                hint='"old." is a prefix, "old.*.weight" a pattern, anything else a whole name',
            )


def _text(new: object, name: str) -> str:
    if not isinstance(new, str):
        raise UsageError(f"rename returned {new!r:.60} for {name!r:.200}", hint="return the new name as text")
    return new


def check_rules(rules: Mapping[str, str]) -> None:
    """Raise `UsageError` for rules that cannot be applied."""
    for pattern, new in rules.items():
        if not isinstance(pattern, str) or not isinstance(new, str):
            raise UsageError(f"rename maps {pattern!r:.60} to {new!r:.60}", hint='give texts, as {"module.": ""}')
        if new.count("*") > pattern.count("*"):
            raise UsageError(
                f"rename maps {pattern!r:.60} to {new!r:.60}, which has more stars",
                hint="each star of the new name stands for one of the old name",
            )


def _apply(pattern: str, replacement: str, name: str) -> str | None:
    if "*" not in pattern:
        if pattern == name:
            return replacement
        is_prefix = not pattern or pattern.endswith((".", "/"))
        return replacement + name[len(pattern) :] if is_prefix and name.startswith(pattern) else None
    match = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    if match is None:
        return None
    texts = iter(match.groups())
    return "".join(part if i == 0 else next(texts) + part for i, part in enumerate(replacement.split("*")))


def new_places(chosen: Iterable[Leaf], rename: Rename) -> list[Keys]:
    """The new keys of each leaf. `rename` gets paths with slashes."""
    renaming = Renaming(rename)
    places = [_keys(leaf, renaming.of(leaf.path)) for leaf in chosen]
    renaming.require_used()
    return places


def nested(chosen: Iterable[Leaf], places: Iterable[Keys]) -> dict[Any, Any]:
    """The leaves as nested dicts, each at its place."""
    root = dict[Any, Any]()
    origins: dict[Keys, str] = {}
    for leaf, keys in zip(chosen, places, strict=True):
        for length in range(1, len(keys) + 1):
            if keys[:length] in origins:
                raise collision(origins[keys[:length]], leaf.path, join_all(keys[:length]))
        origins[keys] = leaf.path
        inside = root
        for key in keys[:-1]:
            inside = inside.setdefault(key, {})
        if keys[-1] in inside:
            other = next(path for found, path in origins.items() if found[: len(keys)] == keys and found != keys)
            raise collision(other, leaf.path, join_all(keys))
        inside[keys[-1]] = leaf.node
    return root


def join_all(keys: Keys) -> str:
    """The path of these keys."""
    path = ""
    for key in keys:
        path = join(path, key)
    return path


def _keys(leaf: Leaf, new: str) -> Keys:
    """The keys of a new path. Keys at its end that are unchanged keep their type, such as an optimizer's numbers."""
    if new == leaf.path:
        return leaf.keys
    if not new:
        raise UsageError(f"rename gives {leaf.path!r:.200} an empty name", hint="keep at least the last part of it")
    parts: list[Any] = [part.replace("~1", "/").replace("~0", "~") for part in new.split("/")]
    for at in range(1, min(len(parts), len(leaf.keys)) + 1):
        if parts[-at] != str(leaf.keys[-at]):
            break
        parts[-at] = leaf.keys[-at]
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Flat:
    """Tensors by name, in the order of the state.

    `tied` maps names to the name of the tensor whose memory they share. `left_out`: paths of values.
    """

    tensors: dict[str, TensorRef | ViewRef]
    tied: dict[str, str]
    left_out: list[str]


def flat(found: Contents, include: str | Iterable[str] | None, exclude: str | Iterable[str], rename: Rename) -> Flat:
    """The tensors to export with one name each.

    Without `include`, only the modules are exported if the state has any. Names begin below the module, or below the
    one entry that holds all chosen tensors.
    """
    by_default = include is None and found.modules
    all_leaves = list(leaves(found.root, lists=True))
    chosen = selected(all_leaves, include, exclude)
    if by_default:
        chosen = [leaf for leaf in chosen if leaf.path.startswith(tuple(f"{module}/" for module in found.modules))]
    left_out = [leaf.path for leaf in chosen if not isinstance(leaf.node, (TensorRef, ViewRef))]
    if by_default:
        left_out += others(all_leaves, chosen, exclude)
    refuse_composite(chosen)
    of_tensors = [leaf for leaf in chosen if isinstance(leaf.node, (TensorRef, ViewRef))]
    if not of_tensors:
        raise UsageError("the chosen entries hold no tensors", hint=_PATTERN_HINT)
    return _named(of_tensors, _common(of_tensors, found.modules), rename, left_out)


def others(all_leaves: Iterable[Leaf], chosen: Iterable[Leaf], exclude: str | Iterable[str]) -> list[str]:
    """The paths of entries that are not chosen.

    If nothing below an entry of the state is chosen, it is named alone. This does not hold for leaves that `exclude`
    matches if it does not match the entry itself.
    """
    paths, tops = {leaf.path for leaf in chosen}, {leaf.keys[:1] for leaf in chosen}
    selection = Selection.of(None, exclude, strict=True, cast=False)

    def shown(leaf: Leaf) -> str:
        top = join_all(leaf.keys[:1])
        is_alone = leaf.keys[:1] not in tops and (selection.selects(leaf.path) or not selection.selects(top))
        return top if is_alone else leaf.path

    return list(dict.fromkeys(shown(leaf) for leaf in all_leaves if leaf.path not in paths))


def refuse_composite(chosen: Iterable[Leaf]) -> None:
    """Raise `UsageError` for sparse tensors, wrappers and tensors without bytes."""
    for leaf in chosen:
        if isinstance(leaf.node, (PartsNode, MetaNode)):
            what = f"of kind {leaf.node.kind}" if isinstance(leaf.node, PartsNode) else "on the meta device"
            raise UsageError(
                f"{leaf.path}: a tensor {what} cannot be exported",
                hint=f"leave it out: --exclude {leaf.path!r}",
            )


def _common(chosen: list[Leaf], modules: tuple[str, ...]) -> int:
    """The number of keys that all names leave out."""
    for module in modules:
        if module and all(leaf.path.startswith(f"{module}/") for leaf in chosen):
            return module.count("/") + 1
    first = chosen[0].keys[:1]
    return 1 if all(leaf.keys[:1] == first and len(leaf.keys) > 1 for leaf in chosen) else 0


def _named(chosen: list[Leaf], skipped: int, rename: Rename, left_out: list[str]) -> Flat:
    renaming, origins = Renaming(rename), dict[str, str]()
    tensors: dict[str, TensorRef | ViewRef] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for leaf in chosen:
        name = renaming.of(".".join(map(str, leaf.keys[skipped:])))
        if name in origins:
            raise collision(origins[name], leaf.path, name)
        origins[name] = leaf.path
        kept = first.setdefault(leaf.node, name)
        if kept != name:
            tied[name] = kept
        elif isinstance(leaf.node, (TensorRef, ViewRef)):
            tensors[name] = leaf.node
    renaming.require_used()
    return Flat(tensors, tied, left_out)


def collision(one: str, other: str, name: str) -> UsageError:
    """The error for two entries that would get one name."""
    return UsageError(
        f"{one} and {other} would both be called {name!r:.200}",
        hint="give them different names by rename, or exclude one",
    )
