"""Reference pages that are made from the code: the Python API, settings, metrics and errors.

Invariant: each list comes from the code that uses it, so a page cannot name a thing that does not exist. `VARIABLES` is
the one exception, and a test compares it with the variables that the code reads.
Failure behaviour: a module that cannot be imported raises its error, which ends the build.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric

from headrace.dataio.core import errors, metrics
from headrace.dataio.sidecar import metrics as daemon_metrics
from headrace.dataio.sidecar import settings
from headrace.dataio.sidecar.job_stats import JobStats
from headrace.dataio.sidecar.save_stats import SaveStats

API: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "datasets": (
        "Datasets and stores",
        "Functions and classes that make, open and check datasets, and the contract of a store.",
        (
            "headrace.dataio",
            "headrace.dataio.store.base:Store",
            *(f"headrace.dataio.store.wrappers:{name}" for name in ("Budget", "Limit", "MetricsStore", "Trace")),
            "headrace.dataio.store.retry:Retry",
            "headrace.dataio.store.hedge:Hedge",
        ),
    ),
    "loaders": ("Loaders", "Everything that a training loop reads batches with.", ("headrace.loaders",)),
    "checkpoints": ("Checkpoints", "Saving, restoring, comparing and publishing steps.", ("headrace.checkpoint",)),
    "dcp": (
        "torch.distributed.checkpoint",
        "Storage for PyTorch's distributed checkpoints.",
        ("headrace.checkpoint.dcp",),
    ),
}
"""Page → title, first sentence, and what it documents: the public names of a module, or one name of it."""

VARIABLES = {
    "HEADRACE_SIDECAR": "path of the daemon's socket; `off` uses no daemon",
    "HEADRACE_SIDECAR_CONFIG": "the daemon's configuration file, in TOML",
    "HEADRACE_JOB": "the job's name on the status page; default: the Slurm job, or the process group",
    "HEADRACE_QUARANTINE": "directory of the lists of bad samples; `off` writes none",
    "HEADRACE_EVENTS": "directory of event logs, which `headrace trace` reads",
    "HEADRACE_S3": "the client for S3: `obstore` or `s3fs`",
    "HEADRACE_PREEMPTION_REPORT": "a file that gets the outcome of the last save before a preemption, as JSON",
    "HEADRACE_DEBUG": "if set, the command line prints the traceback of a bug",
}
"""Environment variables that a user sets. The settings of the daemon have more, one for each."""


def api_page(page: str) -> str:
    """One page of the Python API: `autodoc` takes the text from the docstrings."""
    title, introduction, sources = API[page]
    parts = [f"# {title}", introduction]
    for source in sources:
        module, _, only = source.partition(":")
        names = [only] if only else sorted(importlib.import_module(module).__all__, key=str.lower)
        parts += [_entry(module, name) for name in names]
    return "\n\n".join(parts) + "\n"


def _entry(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        bases = {base.__name__ for base in value.__mro__[1:]}
        options = "" if "Field" in bases else "\n   :members:"  # a user of a field calls none of its methods
        options += "\n   :inherited-members: IterableDataset" if "BaseLoader" in bases else ""
        directive = f".. autoclass:: {module}.{name}{options}"
    elif callable(value):
        directive = f".. autofunction:: {module}.{name}"
    else:
        directive = f".. autodata:: {module}.{name}"
    return f"## {name}\n\n```{{eval-rst}}\n{directive}\n```"


def documented() -> set[str]:
    """Every name that a page of the API documents, as `module.name`."""
    found = set[str]()
    for _, _, sources in API.values():
        for source in sources:
            module, _, only = source.partition(":")
            found |= {f"{module}.{name}" for name in ([only] if only else importlib.import_module(module).__all__)}
    return found


def settings_page() -> str:
    """Environment variables, and the settings of the daemon with their flags, variables and defaults."""
    rows = [
        f"| `{setting.name}` | {_code(setting.default)} | {_code(setting.metavar)} | {_cell(setting.help)} |"
        for setting in settings.SETTINGS
    ]
    return "\n".join(
        [
            "# Settings",
            "",
            "## Environment variables",
            "",
            "| variable | meaning |",
            "| --- | --- |",
            *(f"| `{name}` | {_cell(meaning, code=True)} |" for name, meaning in VARIABLES.items()),
            "",
            "Stores also read the variables of their own tools, such as `AWS_ACCESS_KEY_ID`:",
            "see [stores](stores.md).",
            "",
            "## The daemon",
            "",
            "A setting has one name. `cache_bytes` is the flag `--cache-bytes` of `headrace sidecar run`, the variable",
            f"`{settings.PREFIX}CACHE_BYTES`, and the key `cache_bytes` of the TOML file. The flag overrides the variable,",
            "and the variable overrides the file. [The sidecar](sidecar.md#settings) says which ones change",
            "without a restart.",
            "",
            "| setting | default | value | meaning |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def metrics_page() -> str:
    """The metrics of processes and of the daemon: names, types, labels, meaning."""
    return "\n".join(
        [
            "# Metrics",
            "",
            "Names follow the conventions of Prometheus. The unit is a part of the name: `seconds`, `bytes`, `ratio`, or a plain",
            "count. A counter has `_total` at its end. The daemon answers `/metrics` on its",
            "[status address](sidecar.md#addresses).",
            "",
            "## Trainers and the daemon",
            "",
            "Each process counts these in `headrace.dataio.core.metrics.REGISTRY`. The daemon's `/metrics` has its own counts.",
            "",
            *_metric_table(metrics.REGISTRY.collect(), _labels_of_registry()),
            "",
            "## The daemon: jobs, saves and the cache",
            "",
            *_metric_table(daemon_families(), {}),
            "",
            "## The daemon: local tier and buddies",
            "",
            *_metric_table(tier_families(), {}),
            "",
        ]
    )


def _labels_of_registry() -> dict[str, Sequence[str]]:
    declared = [value for value in vars(metrics).values() if hasattr(value, "_labelnames")]
    return {value._name: value._labelnames for value in declared}


def _metric_table(families: Iterable[Metric], labels: Mapping[str, Sequence[str]]) -> list[str]:
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for family in families:
        names: Sequence[str] = labels.get(family.name) or getattr(family, "_labelnames", None) or ()
        name = family.name + ("_total" if family.type == "counter" else "")
        told = ", ".join(f"`{label}`" for label in names)
        lines.append(f"| `{name}` | {family.type} | {told} | {_cell(family.documentation)} |")
    return lines


def daemon_families() -> list[Metric]:
    """The families of a daemon that has every part of the cache and of its queue."""
    cache = dict.fromkeys(
        [*(name for name, _ in daemon_metrics._CACHE), "fetched_bytes", "reads_ready", "reads_late"], 0
    )
    saves = SaveStats(lambda *_: None)
    saves.room = lambda: dict.fromkeys((name for name, _ in daemon_metrics._ROOM), 0)
    return list(daemon_metrics.JobMetrics(JobStats(time.time), saves, lambda: (cache, ())).collect())


def tier_families() -> list[Metric]:
    """The families of a daemon with a local tier, a buddy, and peers that send it copies."""
    buddy: dict[str, Any] = {"trouble": "", "waiting": 0, "sent_bytes": 0, "copies": ()}
    status = {
        "budget_bytes": 0,
        "used_bytes": 0,
        "kept": (),
        "trouble": "",
        "buddy": buddy,
        "recalled": {},
        "guests": {"peers": 0, "received_bytes": 0, "refused": {}},
    }
    return list(daemon_metrics.TierMetrics(lambda: status).collect())


def error_classes() -> list[type[errors.HeadraceError]]:
    """Every class of errors, each below its base."""

    def below(kind: type[errors.HeadraceError]) -> list[type[errors.HeadraceError]]:
        classes = [value for value in vars(errors).values() if inspect.isclass(value)]
        children = [each for each in classes if issubclass(each, errors.HeadraceError) and each.__base__ is kind]
        return [kind, *(found for child in children for found in below(child))]

    return below(errors.HeadraceError)


def errors_page() -> str:
    """Errors by class, with their codes, exit codes and meaning."""
    rows = [
        f"| `{kind.__name__}` | `{kind.__base__.__name__ if kind.__base__ else ''}` | `{kind.code}` | {kind.exit_code} "
        f"| {_cell(inspect.getdoc(kind) or '', code=True)} |"
        for kind in error_classes()
    ]
    return "\n".join(
        [
            "# Errors",
            "",
            "An error is grouped by what its handler can do. Its text names the thing, the reason and the next step.",
            "`error.code` never changes between versions. The command line exits with the exit code. Import the classes from",
            "`headrace.dataio.core.errors`.",
            "",
            "| class | base | code | exit code | meaning |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _code(text: str | None) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def _cell(text: str, *, code: bool = False) -> str:
    """Text of the code in a cell of a table; `code` keeps its backquotes."""
    for character in "*_<>|[]" if code else "\\`*_<>|[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
