"""The GPU drill: all measurements and checks of Headrace that need a GPU, in one command.

    python bench/gpu_drill.py                    join and install the wheels that arrived, run the parts that can run
    python bench/gpu_drill.py --dry-run          without a GPU: list all parts, and run what needs no GPU
    python bench/gpu_drill.py --parts nvdec,lazy
    python bench/gpu_drill.py fetch              with a network: fetch wheels for CPython 3.12, split them into pieces

It needs Python 3.11 or newer, torch with CUDA, and the checkout that it is in. It needs no network. The pieces of the
wheels are in `.drill/pieces` of the checkout, at most 50 MiB each, so that they can be copied one by one. Packages are
installed into `.drill/site`. The machine's own packages stay.

The drill imports the standard library only, so that it starts anywhere. Each part runs in its own process group, for at
most the time in `SECONDS`. It rewrites `.drill/out/parts/NAME.json` with every figure. A part that is done does not run
again, unless more of the packages that it can use have arrived, or with `--again`. So an interrupted drill continues
where it stopped, and a drill that gets its wheels piece by piece runs more parts each time. Results are also copied to
`$OUT`, which may be empty at each start.

Invariants:

- Every part that was started is in the results with its measurements, even if it failed or was interrupted.
- A part that had no time, or lacks a package, is in the results with the reason.
- The drill never changes the settings of the card.
- No process outlives its part.

Failure behaviour: the exit code is 1 if a part failed or had no time, and 2 for wrong use or damaged wheels, with the
next step. A part that lacks a package is not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SECONDS = {
    "probe": 90,
    "nvdec": 240,
    "feed": 150,
    "staging": 150,
    "lazy": 240,
    "restore": 180,
    "gds": 180,
    "checks": 240,
    "tests": 540,
}
"""The maximum number of seconds for each part, so that a part that hangs does not use the time of the others."""
_STATE = ("torch", "numpy", "msgspec", "blake3", "zstandard", "xxhash", "prometheus_client", "fsspec")
_CLIPS = (*_STATE, "av", "simplejpeg", "pyarrow", "duckdb", "rich")
NEEDS: dict[str, tuple[str, ...]] = {
    "probe": (),
    "nvdec": (*_CLIPS, "nvidia.dali"),
    "feed": _CLIPS,
    "staging": _STATE,
    "lazy": _STATE,
    "restore": _STATE,
    "gds": _STATE,
    "checks": _STATE,
    "tests": (*_CLIPS, "pytest", "pytest_timeout", "hypothesis", "nvidia.dali"),
}
"""The packages that a part needs."""
USES: dict[str, tuple[str, ...]] = {"feed": ("nvidia.dali",), "checks": ("av", "nvidia.dali"), "probe": NEEDS["tests"]}
"""Optional packages with which a part measures more."""
LEAST_SECONDS = 5
"""A part does not begin if fewer seconds are left."""
SHOWS: dict[str, tuple[str, str]] = {
    "probe": ("checks:probe", "the machine: card, PCIe link, driver, versions, what torch, DALI and cuFile see"),
    "nvdec": (
        "nvdec:nvdec",
        "NVDEC by DALI for h264, hevc, vp9, av1: pixels compared with the CPU's, frames/s, decoder utilisation",
    ),
    "feed": (
        "feed:feed",
        "loader to device tensors, copied during a real training step: batches/s, idle share of the device",
    ),
    "staging": (
        "checkpoints:staging",
        "device-to-host copies in GB/s: pinned, pageable, registered memfd; stall of `save` compared with the PCIe limit",
    ),
    "lazy": (
        "checkpoints:lazy",
        "lazy and eager staging during a bf16 transformer step: visible stall, slow-down of the steps",
    ),
    "restore": (
        "checkpoints:restore",
        "restore into GPU tensors, verified, warm and cold page cache: GB/s; equal to the bit",
    ),
    "gds": (
        "checkpoints:gds",
        "GDS/cuFile: probe, compatibility mode, save and restore GB/s compared with copies through host memory",
    ),
    "checks": (
        "checks:run",
        "order of streams, pinned arenas, reuse of batches, memory of decoders: passed or failed",
    ),
    "tests": ("checks:suite", "pytest -m gpu (collected only, without a GPU)"),
}
"""The name of each part → (module:function in `headrace.bench.drill`, one line that describes its result)."""
PARTS = tuple(SECONDS)
HOME = ROOT / ".drill"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill and return the exit code."""
    from headrace.bench.drill.wheels import DrillError

    args = _parser().parse_args(argv)
    try:
        if args.command == "fetch":
            return _fetch(args)
        if args.one:
            return _run_part(args.one, args.out, dry=args.dry_run)
        return _drill(args)
    except DrillError as error:
        print(f"gpu_drill: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("run", "fetch"), default="run")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: list all parts, run what needs no GPU")
    parser.add_argument("--again", action="store_true", help="run parts that are done already")
    parser.add_argument("--limit", type=float, default=540, help="the most seconds of any part (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=1700, help="seconds for all parts together (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=HOME / "out",
        help="results (default: %(default)s), also copied to $OUT if that is set",
    )
    parser.add_argument("--pieces", type=Path, default=HOME / "pieces")
    parser.add_argument("--site", type=Path, default=HOME / "site")
    parser.add_argument("--python", default="3.12", help="fetch: for this CPython (default: %(default)s)")
    parser.add_argument("--without", default="", help="fetch: packages that the machine has, separated by commas")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def _fetch(args: argparse.Namespace) -> int:
    from headrace.bench.drill import wheels

    without = {name.strip().lower().replace("_", "-") for name in args.without.split(",")}
    fetched = wheels.fetch(HOME / f"wheels-{args.python}", ROOT / "constraints.txt", args.python)
    selected = [path for path in fetched if path.name.split("-")[0].lower().replace("_", "-") not in without]
    shrunk = [wheels.smaller(path, HOME / f"small-{args.python}", args.python) for path in selected]
    manifest = wheels.split(shrunk, args.pieces)
    size = sum(entry["bytes"] for entry in manifest["wheels"])
    print(f"{len(shrunk)} wheels, {size / 2**20:.0f} MiB, in {len(manifest['pieces'])} pieces in {args.pieces}")
    return 0


def _drill(args: argparse.Namespace) -> int:
    names = [name for name in args.parts.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        print(f"gpu_drill: no part {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for name in PARTS:
        print(f"{'*' if name in names else ' '} {name:8} {SHOWS[name][1]}", flush=True)
    (args.out / "parts").mkdir(parents=True, exist_ok=True)
    environ = _environ(args)
    absent = _absent(environ)
    print(f"missing packages: {', '.join(absent) or 'nothing'}", flush=True)
    began, results = time.monotonic(), dict[str, dict[str, Any]]()
    for name in names:
        remaining = args.budget - (time.monotonic() - began)
        if lacking := [package for package in NEEDS[name] if package in absent]:
            results[name] = _skipped_part(name, args, lacking)
        else:
            uses = [package for package in USES.get(name, ()) if package not in absent]
            results[name] = _part(name, args, environ, min(args.limit, SECONDS[name], remaining), uses)
        _write_results(args.out, _all(args.out, results), args.dry_run)
    print(f"\nwrote {args.out / 'drill.json'} and {args.out / 'drill.md'}")
    bad = [part for part in results.values() if (part["status"] != "done" and not part.get("lacking")) or _errors(part)]
    return 1 if bad else 0


def _absent(environ: dict[str, str]) -> list[str]:
    """Return the packages of all parts that this Python cannot find."""
    names = sorted({name for part in PARTS for name in (*NEEDS[part], *USES.get(part, ()))})
    program = (
        "import importlib.util, sys\n"
        "def found(name):\n"
        "    try:\n"
        "        return importlib.util.find_spec(name) is not None\n"
        "    except ImportError:\n"
        "        return False\n"
        "print(*[name for name in sys.argv[1:] if not found(name)])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program, *names], env=environ, capture_output=True, text=True, timeout=120
    )
    return completed.stdout.split()


def _skipped_part(name: str, args: argparse.Namespace, lacking: Sequence[str]) -> dict[str, Any]:
    """Return the result of a part that lacks packages. Its earlier measurements with them stay."""
    earlier = _read(args.out / "parts" / f"{name}.json")
    if earlier and earlier.get("status") == "done":
        return earlier
    why = f"missing: {', '.join(lacking)}; `fetch` downloads it, on a machine with a network"
    print(f"{name}: skipped, {why}", flush=True)
    return {"name": name, "status": "skipped", "why": why, "lacking": list(lacking)}


def _all(out: Path, results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of the parts of this run and of earlier runs."""
    before = {name: _read(out / "parts" / f"{name}.json") for name in PARTS}
    return [part for name in PARTS if (part := results.get(name) or before[name]) is not None]


def _read(path: Path) -> dict[str, Any] | None:
    """Read the file of a part; None if it is missing or incomplete."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result


def _environ(args: argparse.Namespace) -> dict[str, str]:
    """Install the wheels that arrived, and return the variables with which the parts find them.

    The machine's own packages come first.
    """
    from headrace.bench.drill import wheels

    if (args.pieces / wheels.MANIFEST).exists() and not wheels.is_installed(args.pieces, args.site):
        installed = wheels.install(wheels.join(args.pieces, HOME / "wheels"), args.site)
        wheels.note_installed(args.pieces, args.site)
        lacking = ", ".join(wheels.missing(args.pieces)) or "none"
        print(f"installed {len(installed)} wheels into {args.site}; missing pieces: {lacking}", flush=True)
    wheels.register(ROOT / "pyproject.toml", args.site)
    paths = [str(ROOT), str(args.site), os.environ.get("PYTHONPATH", "")]
    cufile = {"CUFILE_ENV_PATH_JSON": str(_cufile(args.out)), **os.environ}
    return {**cufile, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _cufile(out: Path) -> Path:
    """Write the settings of cuFile: they allow its compatibility mode, and put its log into `out`."""
    path = (out / "cufile.json").resolve()
    settings = {"properties": {"allow_compat_mode": True}, "logging": {"level": "ERROR", "dir": str(out.resolve())}}
    path.write_text(json.dumps(settings))
    return path


def _part(
    name: str, args: argparse.Namespace, environ: dict[str, str], seconds: float, uses: Sequence[str] = ()
) -> dict[str, Any]:
    path = args.out / "parts" / f"{name}.json"
    earlier = _read(path)
    same = earlier and earlier.get("dry") == args.dry_run and earlier.get("uses", []) == list(uses)
    if earlier and same and not args.again and earlier.get("status") == "done":
        print(f"{name}: done before", flush=True)
        return earlier
    if seconds < LEAST_SECONDS:
        return {"name": name, "status": "skipped", "why": "the budget was spent; run the command again"}
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", name, "--out", str(args.out)]
    began = time.monotonic()
    print(f"{name} (at most {seconds:.0f} s) …", flush=True)
    why = _run([*command, *(["--dry-run"] if args.dry_run else [])], environ, seconds, path.with_suffix(".log"))
    result: dict[str, Any] = _read(path) or {"name": name, "status": "failed"}
    if result["status"] != "done":
        result["why"] = why
    result |= {"seconds": round(time.monotonic() - began, 1), "dry": args.dry_run, "uses": list(uses)}
    path.write_text(json.dumps(result, indent=1))
    why = "; ".join(_errors(result)) or result.get("why", "")
    print(f"{name}: {result['status']} in {result['seconds']} s {why}"[:600], flush=True)
    return result


def _run(command: Sequence[str], environ: dict[str, str], seconds: float, log: Path) -> str:
    """Run a command in its own process group, kill the group, and return the reason for missing results."""
    cut = ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            cut = f"stopped after {seconds:.0f} s: "
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output_end = log.read_bytes()[-2000:].decode(errors="replace")
    return cut + (output_end or f"exit status {process.returncode}")


def _errors(part: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {error}" for name, found in part.get("candidates", {}).items() for error in found.get("errors", [])
    ]


def _run_part(name: str, out: Path, *, dry: bool) -> int:
    """Run one part, in its own process."""
    gpu = not dry and _gpu()
    if not gpu and not dry:
        raise SystemExit("torch sees no GPU here; --dry-run runs what needs no GPU")
    module, _, function = SHOWS[name][0].partition(":")
    part: Any = getattr(importlib.import_module(f"headrace.bench.drill.{module}"), function)
    result: Any = importlib.import_module("headrace.bench.drill.result")
    result.PartResult.path = out / "parts" / f"{name}.json"
    part(gpu).finish()
    return 0


def _gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _write_results(out: Path, parts: list[dict[str, Any]], dry: bool) -> None:
    """Write the results document and its Markdown, also to `$OUT`."""
    machine = {"python": platform.python_version(), "kernel": platform.release(), "cpus": len(os.sched_getaffinity(0))}
    for part in parts:
        if part["name"] == "probe":
            machine |= {
                "gpu": part.get("settings", {}).get("name", "none"),
                "packages": {"torch": part.get("settings", {}).get("torch")},
            }
    published = [{key: value for key, value in part.items() if key not in ("dry", "uses", "lacking")} for part in parts]
    command = ["python", "bench/gpu_drill.py", *(["--dry-run"] if dry else [])]
    started = datetime.now(UTC).isoformat(timespec="seconds")
    run = {
        "command": command,
        "started": started,
        "environment": machine,
        "parts": published,
        "format": "headrace-bench",
        "version": 1,
    }
    (out / "drill.json").write_text(json.dumps(run, indent=1))
    (out / "drill.md").write_text("\n\n".join(_markdown(part) for part in parts) + "\n")
    if (elsewhere := os.environ.get("OUT")) and Path(elsewhere).resolve() != out.resolve():
        shutil.copytree(out, elsewhere, dirs_exist_ok=True)


def _markdown(part: dict[str, Any]) -> str:
    head = f"## {part.get('title') or part['name']}: {part['status']}\n\n{part.get('why', '')}".strip()
    rows = []
    for name, samples in part.get("candidates", {}).items():
        for key, values in samples["metrics"].items():
            about, ordered = part["metrics"][key], sorted(values)
            middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
            rows.append(
                f"| {name} | {about['title']} | {middle:.4g} ({ordered[0]:.4g}–{ordered[-1]:.4g}) {about['unit']} |"
            )
    table = "\n\n| | | median (min–max) |\n|---|---|---|\n" + "\n".join(rows) if rows else ""
    troubles = "".join(f"\n\n**{error}**" for error in _errors(part))
    facts = ", ".join(f"{key} {value}" for key, value in part.get("settings", {}).items())
    notes = "".join(f"\n\n{note}" for note in part.get("notes", []))
    return f"{head}\n\n{facts}{table}{troubles}{notes}"


if __name__ == "__main__":
    sys.exit(main())
