"""`headrace ckpt export` and `headrace ckpt import`: steps as files of other tools, and back.

Invariant: `headrace ckpt --help` needs no torch. The commands load it when they run.
Failure behaviour: the errors of `headrace.checkpoint.exchange`. An export that was interrupted continues when the same
command is repeated.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.checkpoint.repository import tag_records
from headrace.checkpoint.repository.check import step_of
from headrace.dataio.core.cli import byte_progress, byte_rate, one_line, print_json, print_list
from headrace.dataio.core.errors import UsageError, translate_os_errors
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.checkpoint.exchange.exporting import ExportReport
    from headrace.checkpoint.exchange.importing import ImportedTensor, ImportReport
    from headrace.checkpoint.exchange.writing import Progress

    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

_MAX_RULES = 16 << 20
_FORMATS = ("hf", "safetensors", "dcp", "torch")


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    export = actions.add_parser("export", help="write a step as files of transformers, safetensors, DCP or torch")
    common(export)
    export.epilog = f"{export.epilog} · 6 no space"
    export.add_argument("dest", metavar="DEST", help="the local folder (hf, dcp) or file (safetensors, torch) to write")
    export.add_argument("--step", default="latest", help="a number, latest (default), or tag:NAME")
    export.add_argument(
        "--format",
        choices=_FORMATS,
        help="default: safetensors for a DEST that ends in .safetensors, torch for .pt and .pth, else hf, a folder of"
        " weights for transformers, without config.json",
    )
    for name, what in (("include", "export only"), ("exclude", "leave out")):
        help_text = f"{what} entries that match, such as 'model/*'; may be repeated"
        export.add_argument(f"--{name}", action="append", metavar="PATTERN", help=help_text)
    export.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="convert tensors of floating-point numbers")
    export.add_argument(
        "--max-shard-size", metavar="SIZE", help="of a safetensors file (hf: 5GB; safetensors: no limit)"
    )
    export.add_argument(
        "--rank", type=int, default=0, help="the rank whose rank-local entries are exported (default: 0)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace files that exist")
    importing = actions.add_parser(
        "import", help="save a Hugging Face model, a torch file or a folder of DCP as a step"
    )
    importing.add_argument("source", metavar="SRC", help="a local file or folder; files that can run code are refused")
    common(importing)
    importing.add_argument("--step", type=int, default=0, help="the number of the new step (default: 0)")
    importing.add_argument("--entry", default="model", help="the entry of the state for a model (default: model)")
    importing.add_argument(
        "--exclude", action="append", metavar="PATTERN", help="leave out entries that match; may be repeated"
    )
    importing.add_argument("--base", metavar="RUN", help="another run: chunks that it has are not stored again")
    importing.add_argument(
        "--dry-run", action="store_true", help="check the source, list what would be saved, and store nothing"
    )
    for parser in (export, importing):
        parser.add_argument("--rename", metavar="FILE", help='JSON or TOML with new names: {"old.": "new."}')


def _export(store: Store, options: argparse.Namespace) -> int:
    from headrace.checkpoint.exchange.exporting import export

    run, began = _run(options, "export"), time.monotonic()
    step = step_of(options.step)
    tag = None
    if isinstance(step, str) and step.startswith(tag_records.PREFIX):
        step, tag = "latest", step.removeprefix(tag_records.PREFIX)
    with byte_progress("exporting", _describe, quiet=options.json) as progress:
        report = export(
            store,
            options.dest,
            run=run,
            step=step,
            tag=tag,
            format=options.format,
            include=options.include,
            exclude=options.exclude or (),
            dtype=options.dtype,
            rename=_rules(options.rename),
            max_shard_size=options.max_shard_size,
            rank=options.rank,
            overwrite=options.overwrite,
            progress=progress,
        )
    if options.json:
        print_json(msgspec.to_builtins(report))
    else:
        _print_export(report, options.exclude or (), time.monotonic() - began)
    return 0


def _print_export(report: ExportReport, exclude: Sequence[str], seconds: float) -> None:
    from headrace.checkpoint.state.fit import Selection

    files = counted(len(report.files), "file")
    print(
        f"step {report.step} of {report.run}: {counted(report.tensors, 'tensor')} in {files} of format {report.format}"
    )
    if report.bytes_written < report.bytes:
        print(f"continued: {format_bytes(report.bytes - report.bytes_written)} were there already")
    print(f"wrote {byte_rate(report.bytes_written, seconds)}")
    print_list("tied names, which are left out", [f"{name} = {kept}" for name, kept in report.tied.items()], 8)
    reason = "torch.load(weights_only=True) does not read them"
    if report.format in ("hf", "safetensors"):
        reason = "the format holds only tensors, and without --include only those of modules"
    selection = Selection.of(None, exclude, strict=True, cast=False)
    excluded = {path for path in report.left_out if not selection.selects(path)}
    print_list("left out by --exclude", sorted(excluded), 8)
    print_list(f"left out, because {reason}", [path for path in report.left_out if path not in excluded], 8)


def _import(store: Store, options: argparse.Namespace) -> int:
    from headrace.checkpoint.exchange.importing import import_checkpoint

    run, began = _run(options, "import"), time.monotonic()
    with byte_progress("importing", _describe, quiet=options.json) as progress:
        report = import_checkpoint(
            options.source,
            store,
            run=run,
            step=options.step,
            entry=options.entry,
            base=options.base,
            rename=_rules(options.rename),
            exclude=options.exclude or (),
            dry_run=options.dry_run,
            progress=progress,
        )
    if options.json:
        print_json(msgspec.to_builtins(report))
    else:
        _print_import(report, options, time.monotonic() - began)
    return 0


def _print_import(report: ImportReport, options: argparse.Namespace, seconds: float) -> None:
    entries = ", ".join(report.entries[:8]) + (", ..." if len(report.entries) > 8 else "")
    print(one_line(f"step {report.step} of {report.run}: {counted(report.tensors, 'tensor')} in the entries {entries}"))
    if options.dry_run:
        lines = [_described(tensor, options.entry) for tensor in report.contents]
        print_list("tensors", lines, len(lines))
        print_list("values", report.values, len(report.values))
    print_list("tied names, which share the values of others", [f"{a} = {b}" for a, b in report.tied.items()], 8)
    print_list("left out by --exclude", report.left_out, 8)
    if options.dry_run:
        print(f"nothing was stored; without --dry-run, {format_bytes(report.bytes_state)} are read")
        return
    print(f"{format_bytes(report.bytes_written)} written, {format_bytes(report.bytes_deduplicated)} deduplicated")
    print(f"read {byte_rate(report.bytes_state, seconds)}")


def _described(tensor: ImportedTensor, entry: str) -> str:
    """A tensor of a dry run, with its name in the source if --rename changed it."""
    is_renamed = tensor.source not in (tensor.path, tensor.path.removeprefix(f"{entry}/"))
    renamed = f", named {tensor.source} in the source" if is_renamed else ""
    return f"{tensor.path} {tensor.dtype} {tensor.shape}{renamed}"


def _describe(done: Progress) -> str:
    return one_line(done.name)


def _run(options: argparse.Namespace, action: str) -> str:
    if not options.run:
        raise UsageError(f"{action} needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    run: str = options.run
    return run


def _rules(name: str | None) -> dict[str, str] | None:
    """The rules of a file of --rename, in their order."""
    if name is None:
        return None
    path = Path(name)
    with translate_os_errors(f"reading {path}"):
        if path.stat().st_size > _MAX_RULES:
            raise UsageError(f"{path} has more than {_MAX_RULES} bytes", hint="write fewer rules, with prefixes")
        data = path.read_bytes()
    try:
        rules = tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error!s:.200}", hint='write {"old.": "new."}') from None
    if not isinstance(rules, dict):
        raise UsageError(f"{path} is not a map of names", hint='write {"old.": "new."}')
    return rules


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {"export": _export, "import": _import}
