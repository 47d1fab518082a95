"""The GPU drill: wheels survive the journey in pieces, every part is in the results, and it goes on where it stopped."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench import gpu_drill
from headrace.bench.core import results
from headrace.bench.drill import checks, nvdec, wheels
from headrace.bench.drill.result import PartResult
from headrace.bench.drill.wheels import DrillError
from headrace.dataio.core.errors import HeadraceError
from headrace.loaders.decode import dali as decode_nvdec
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.pyav import PyAVDecoder

DRILL = Path(gpu_drill.__file__)


def make_wheel(folder: Path, name: str, size: int = 100) -> Path:
    """A wheel that pip installs: one module with `size` bytes of data."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": b"DATA = " + repr(os.urandom(size)).encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


def test_wheels_travel_in_pieces_and_install_without_a_network(tmp_path: Path) -> None:
    made = [make_wheel(tmp_path / "made", f"drilltest{n}", 3000 * (n + 1)) for n in range(3)]
    manifest = wheels.split(made, tmp_path / "pieces", most=4096)
    assert len(manifest["pieces"]) > 3
    assert max(path.stat().st_size for path in (tmp_path / "pieces").glob("*.piece")) <= 4096
    joined = wheels.join(tmp_path / "pieces", tmp_path / "joined")
    assert [path.read_bytes() for path in joined] == [path.read_bytes() for path in made]
    assert not wheels.is_installed(tmp_path / "pieces", tmp_path / "site")
    assert wheels.install(joined, tmp_path / "site") == [path.name for path in made]
    wheels.note_installed(tmp_path / "pieces", tmp_path / "site")
    assert wheels.is_installed(tmp_path / "pieces", tmp_path / "site")
    (tmp_path / "pieces" / "0000.piece").unlink()
    assert not wheels.is_installed(tmp_path / "pieces", tmp_path / "site"), "something else has arrived"
    done = subprocess.run(
        [sys.executable, "-c", "import drilltest2; print(len(drilltest2.DATA), drilltest2.__file__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout.split() == ["9000", str(tmp_path / "site" / "drilltest2.py")], done.stderr


def test_a_checkout_that_is_not_installed_has_a_version(tmp_path: Path) -> None:
    wheels.register(gpu_drill.ROOT / "pyproject.toml", tmp_path / "site")
    code = "from importlib.metadata import version; print(version('headrace'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == tomllib.loads((gpu_drill.ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_what_the_machine_has_is_not_installed_again(tmp_path: Path) -> None:
    numpy = tmp_path / "numpy-0.1-py3-none-any.whl"
    numpy.write_bytes(b"not even a wheel")
    assert wheels.install([numpy], tmp_path / "site") == []


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5), st.integers(1, 200))
def test_any_files_come_back_whole_from_pieces_of_any_size(contents: list[bytes], most: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = []
        for number, content in enumerate(contents):
            paths.append(folder / f"w{number}.whl")
            paths[-1].write_bytes(content)
        wheels.split(paths, folder / "pieces", most)
        assert wheels.missing(folder / "pieces") == []
        assert [path.read_bytes() for path in wheels.join(folder / "pieces", folder / "out")] == contents


def test_wheels_are_put_together_as_far_as_their_pieces_arrived_whole(tmp_path: Path) -> None:
    made = [make_wheel(tmp_path / "made", f"drilltest{n}", 2000 * (n + 1)) for n in range(4)]
    wheels.split(made, tmp_path / "pieces", most=2048)
    pieces = sorted((tmp_path / "pieces").glob("*.piece"))
    ends = [sum(path.stat().st_size for path in made[: n + 1]) for n in range(4)]
    gone, damaged = pieces[ends[0] // 2048 + 1], pieces[-1]
    gone.unlink()
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    assert wheels.missing(tmp_path / "pieces") == [gone.name, damaged.name]
    joined = wheels.join(tmp_path / "pieces", tmp_path / "joined")
    assert [path.name for path in joined] == [made[0].name, made[2].name]
    assert [path.read_bytes() for path in joined] == [made[0].read_bytes(), made[2].read_bytes()]


def test_a_wheel_made_smaller_is_installed_as_it_was_but_for_what_is_for_other_pythons(tmp_path: Path) -> None:
    made = make_wheel(tmp_path / "made", "drilltest", 9000)
    with zipfile.ZipFile(made, "a") as archive:
        for version in ("311", "312", "312t"):
            archive.writestr(f"drilltest_native.cpython-{version}-x86_64-linux-gnu.so", version)
    small = wheels.smaller(made, tmp_path / "small", "3.12")
    assert small.stat().st_size < made.stat().st_size
    assert wheels.install([small], tmp_path / "site") == [made.name]
    assert "DATA" in (tmp_path / "site" / "drilltest.py").read_text()
    assert [path.name.split("-")[1] for path in (tmp_path / "site").glob("*.so")] == ["312"]


def test_what_most_parts_need_is_carried_first_and_dali_last() -> None:
    names = ["nvidia_dali_cuda130-2.4-x.whl", "av-18-x.whl", "libcst-1-x.whl", "msgspec-1-x.whl", "numpy-2-x.whl"]
    ordered = sorted(map(Path, names), key=wheels._place)
    assert [path.name.split("-")[0] for path in ordered] == ["msgspec", "numpy", "av", "libcst", "nvidia_dali_cuda130"]


def test_the_drill_brings_what_the_project_needs_on_a_gpu_machine_except_torch_and_network_stores() -> None:
    project = tomllib.loads((gpu_drill.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in ("data", "torch", "dali", "sql") for line in extras[name])]
    needed = {re.split(r"[^a-z0-9-]", line)[0] for line in lines} - {"headrace"}
    assert needed - set(wheels.NEEDED) == {"torch"}


@pytest.mark.parametrize("name", ["../evil.whl", "/etc/passwd", "a/b.whl", "evil.py", ""])
def test_a_manifest_never_names_a_path(tmp_path: Path, name: str) -> None:
    wheels.split([make_wheel(tmp_path / "made", "drilltest")], tmp_path / "pieces")
    path = tmp_path / "pieces" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["wheels"][0]["name"] = name
    path.write_text(json.dumps(manifest))
    with pytest.raises(DrillError, match="which is no wheel"):
        wheels.join(tmp_path / "pieces", tmp_path / "joined")


def test_a_manifest_that_lies_about_digests_gives_no_wheel(tmp_path: Path) -> None:
    wheels.split([make_wheel(tmp_path / "made", "drilltest")], tmp_path / "pieces")
    path = tmp_path / "pieces" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["wheels"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(DrillError, match="does not have the digest in the manifest"):
        wheels.join(tmp_path / "pieces", tmp_path / "joined")
    assert not list((tmp_path / "joined").iterdir())
    path.write_text("{")
    with pytest.raises(DrillError, match=r"run `gpu_drill\.py fetch`"):
        wheels.join(tmp_path / "pieces", tmp_path / "joined")


def drill(out: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRILL), "--dry-run", "--out", str(out), "--pieces", str(out / "none"), *arguments]
    given = {name: value for name, value in os.environ.items() if name != "OUT"} | environ
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env=given)


def test_a_dry_run_lists_all_parts_runs_what_needs_no_gpu_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done = drill(tmp_path, "--parts", "probe")
    assert done.returncode == 0, done.stdout + done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines()[:8]]
    assert listed == ["*", "nvdec", "feed", "staging", "lazy", "restore", "gds", "checks"]
    (probe,) = results.read(tmp_path / "drill.json").parts
    assert (probe.name, probe.status) == ("probe", "done")
    assert probe.notes == ["no GPU: torch.cuda.is_available() is False"]
    again = drill(tmp_path, "--parts", "probe,restore", OUT=str(tmp_path / "carried"))
    assert "restore: done in" in again.stdout
    assert "probe: done before" in again.stdout
    parts = results.read(tmp_path / "drill.json").parts
    assert [part.name for part in parts] == ["probe", "restore"], "measurements of an earlier start were lost"
    assert parts[1].candidates["warm"].metrics["rate"][0] > 0
    assert not parts[1].failed
    assert "## Restore into the device: done" in (tmp_path / "drill.md").read_text()
    carried = results.read(tmp_path / "carried" / "drill.json").parts
    assert [part.name for part in carried] == ["probe", "restore"]


def part_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, seconds: float = 60) -> dict[str, Any]:
    """What becomes of a part whose process is this program; it may use `part`."""
    script = tmp_path / "part.py"
    first = (
        "import sys, os, signal, subprocess, time; from pathlib import Path\n"
        "from headrace.bench.drill.result import PartResult"
    )
    script.write_text(f"""{first}
out = Path(sys.argv[sys.argv.index("--out") + 1])
PartResult.path = out / "parts" / "feed.json"
part = PartResult("feed", "Feed")
part.metric("rate", "rate", "1/s")
{program}
""")
    monkeypatch.setattr(gpu_drill, "__file__", str(script))
    (tmp_path / "out" / "parts").mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": str(gpu_drill.ROOT)}
    return gpu_drill._part("feed", Namespace(out=tmp_path / "out", again=False, dry_run=True), environ, seconds)


def test_a_part_that_dies_keeps_what_it_had_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = "part.add('loader', 'rate', 7.0); print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    found = part_of(tmp_path, monkeypatch, dies)
    assert (found["status"], found["why"]) == ("interrupted", "last words\n")
    assert found["candidates"]["loader"]["metrics"] == {"rate": [7.0]}
    kept = gpu_drill._all(tmp_path / "out", {})
    assert [part["name"] for part in kept] == ["feed"]


def test_a_part_that_measured_nothing_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = part_of(tmp_path, monkeypatch, "raise SystemExit('no card')")
    assert (found["status"], found["why"]) == ("failed", "no card\n")


def test_a_part_that_hangs_is_cut_off_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = f"child = subprocess.Popen(['sleep', '600']); Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))"
    hangs = f"{child}; time.sleep(600)"
    monkeypatch.setattr(gpu_drill, "LEAST_SECONDS", 0)
    found = part_of(tmp_path, monkeypatch, hangs, seconds=2)
    assert (found["status"], found["why"]) == ("failed", "stopped after 2 s: exit status -9")
    if (tmp_path / "child").exists():  # else the machine was so busy that the part had not come so far
        until = time.monotonic() + 60
        while running(int((tmp_path / "child").read_text())) and time.monotonic() < until:
            time.sleep(0.01)
        assert not running(int((tmp_path / "child").read_text()))


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_without_time_a_part_is_skipped_and_in_the_results(tmp_path: Path) -> None:
    done = drill(tmp_path, "--parts", "probe", "--budget", "1")
    assert done.returncode == 1
    (skipped,) = results.read(tmp_path / "drill.json").parts
    assert (skipped.status, skipped.why) == ("skipped", "the budget was spent; run the command again")
    assert "## probe: skipped" in (tmp_path / "drill.md").read_text()


def test_wrong_use_is_said(tmp_path: Path) -> None:
    done = drill(tmp_path, "--parts", "guess")
    assert done.returncode == 2
    assert "no part 'guess'; there are probe" in done.stderr


def test_every_part_of_the_drill_can_be_imported_and_says_what_it_shows() -> None:
    assert set(gpu_drill.SHOWS) == set(gpu_drill.PARTS)
    for where, line in gpu_drill.SHOWS.values():
        module, _, function = where.partition(":")
        assert callable(getattr(importlib.import_module(f"headrace.bench.drill.{module}"), function))
        assert len(line) > 20


class Card:
    """Replaces libnvidia-ml: a card that reports the use of its decoders and nothing else."""

    def __init__(self, failed: int = 0) -> None:
        self.failed = failed

    def nvmlInit_v2(self) -> int:
        return self.failed

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, card: Any) -> int:
        card._obj.value = 100 + number
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, card: Any) -> int:
        card._obj.value = int(address[9:11], 16)
        return 0

    def nvmlDeviceGetDecoderUtilization(self, card: Any, busy: Any, period: Any) -> int:
        busy._obj.value = card.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, card: Any, rates: Any) -> int:
        return 3


def test_the_driver_is_asked_about_the_card_that_is_used() -> None:
    card = nvdec._card(Card(), "00000000:1B:00.0")
    assert nvdec.read_utilization(Card(), card) == {"dec": 0x1B}
    assert nvdec.read_utilization(Card(), nvdec._card(Card(), None)) == {"dec": 100}
    with pytest.raises(OSError, match="NVML error 9"):
        nvdec._card(Card(9), None)


def test_without_nvml_nvidia_smi_samples_the_card_that_is_used_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\necho '# gpu sm dec'\necho '1 5 7'\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    for address, chosen in (("00000000:1B:00.0", "00000000:1B:00.0"), (None, "0")):
        (tmp_path / "calls").unlink(missing_ok=True)
        with nvdec.UtilizationSampler(address) as watch:
            until = time.monotonic() + 60
            while not (tmp_path / "calls").exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.2)
        assert (tmp_path / "calls").read_text().split()[-2:] == ["-i", chosen]
        assert watch.samples["dec"] == [7]


def test_the_table_of_nvidia_smi_is_read_by_its_own_heading() -> None:
    names, units = "# gpu  sm  mem  enc  dec  jpg  ofa", "# Idx   %    %    %    %    %    %"
    text = f"{names}\n{units}\n    0   12    3    0   88    -    0\n"
    assert nvdec.parse_dmon(text * 2)["dec"] == [88, 88]
    assert nvdec.parse_dmon(text).get("jpg", []) == []
    assert nvdec.parse_dmon("no table") == {}


def test_a_part_that_lacks_a_package_says_which_fails_nothing_and_is_run_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_drill, "_absent", lambda environ: ["av", "nvidia.dali"])
    monkeypatch.setattr(gpu_drill, "_environ", lambda args: {**os.environ, "PYTHONPATH": str(gpu_drill.ROOT)})
    command = ["--dry-run", "--out", str(tmp_path), "--parts", "nvdec,checks"]
    assert gpu_drill.main(command) == 0
    assert "nvdec: skipped, missing: av, nvidia.dali; `fetch` downloads it" in capsys.readouterr().out
    first, second = results.read(tmp_path / "drill.json").parts
    assert (first.status, second.status) == ("skipped", "done")
    assert gpu_drill.main(command) == 0
    assert "checks: done before" in capsys.readouterr().out
    monkeypatch.setattr(gpu_drill, "_absent", lambda environ: [])
    assert gpu_drill.main(["--dry-run", "--out", str(tmp_path), "--parts", "checks"]) == 0
    assert "checks: done in" in capsys.readouterr().out, "with DALI it would show more"


def test_packages_that_this_python_cannot_find_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PYTHONPATH": str(gpu_drill.ROOT), "PATH": os.environ["PATH"]}
    found = gpu_drill._absent(environ)
    assert not {"torch", "av"} & set(found)
    monkeypatch.setitem(gpu_drill.NEEDS, "gds", ("torch", "nothing_of_this_name", "nvidia.nothing", "absent.module"))
    assert {"nothing_of_this_name", "nvidia.nothing", "absent.module"} <= set(gpu_drill._absent(environ))


def test_the_checks_of_saves_and_batches_pass_where_nothing_runs_behind_the_program() -> None:
    checks.saves("cpu", 1 << 20)
    checks.batches("cpu", 12)


def test_the_checks_of_saves_and_batches_find_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.loaders.batch.batch.write_pixels", lambda target, *_: target.zero_())
    with pytest.raises(AssertionError, match="batches had other contents"):
        checks.batches("cpu", 12)
    monkeypatch.setattr("headrace.checkpoint.saving.copying._copy", lambda *_: None)
    with pytest.raises(AssertionError, match="is not what it was at step 1"):
        checks.saves("cpu", 1 << 20)


def test_only_files_with_tests_for_a_gpu_are_collected() -> None:
    assert "tests/loaders/decode/test_frames.py" in checks.files()
    assert "tests/bench/test_report.py" not in checks.files()


class Standing(PyAVDecoder):
    """In the place of DALI on a GPU."""

    seen: ClassVar[list[int]] = []
    worse = 0

    def __init__(self, device_id: int, threads: int = 4) -> None:
        super().__init__()
        self.seen.append(threads)

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        return [
            Decoded((one.frames.int() + self.worse).clamp(0, 255).to(torch.uint8), one.pts)
            if isinstance(one, Decoded)
            else one
            for one in super().decode(requests)
        ]


@pytest.mark.parametrize("worse", [0, 3])
def test_what_nvdec_decodes_is_compared_for_each_number_of_threads(
    worse: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.loaders.decode.dali.DaliDecoder", Standing)
    monkeypatch.setattr(Standing, "worse", worse)
    monkeypatch.setattr(Standing, "seen", [])
    for name, value in (("_SECONDS", 0.0), ("_FRAMES", 4), ("_address", lambda: None)):
        monkeypatch.setattr(nvdec, name, value)
    monkeypatch.setattr(nvdec, "_CLIPS", dict.fromkeys(nvdec._CLIPS, 4))
    nvdec.make(tmp_path / "clip.mp4", "libx264", 160, 144)
    part = PartResult("nvdec", "Decoding")
    nvdec._measure(part, "h264", 144, tmp_path / "clip.mp4", True)
    assert Standing.seen == [4, 1, 2, 8]
    assert sorted(part.candidates) == ["DALI, GPU", *(f"DALI, GPU, {n} threads" for n in (1, 2, 8)), "PyAV"]
    for name, found in part.candidates.items():
        assert found["metrics"]["h264_144_rate"]
        assert bool(found["errors"]) == (worse > 2 and name != "PyAV")
    if worse:
        assert "pixels are off by up to 3" in part.candidates["DALI, GPU"]["errors"][0]


def test_a_check_that_fails_is_an_error_of_the_part_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def this_is_wrong(part: PartResult, name: str) -> None:
        checks._expect(False, "it is not as it should be")

    def this_is_right(part: PartResult, name: str) -> None:
        checks._expect(True, "")

    def needs_an_absent_package(part: PartResult, name: str) -> None:
        raise RuntimeError

    known: Any = {this_is_wrong: (), this_is_right: ("torch",), needs_an_absent_package: ("nothing_of_this_name",)}
    monkeypatch.setattr(checks, "CHECKS", known)
    part = checks.run(True)
    assert part.candidates["this is wrong"] == {
        "metrics": {"right": [0]},
        "errors": ["AssertionError: it is not as it should be"],
    }
    assert part.candidates["this is right"] == {"metrics": {"right": [1]}, "errors": []}
    assert part.notes == ["needs an absent package: not checked, missing: nothing_of_this_name"]


def test_what_dali_is_not_given_is_told_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.loaders.decode.dali.DaliDecoder", Standing)
    monkeypatch.setattr(nvdec, "_FRAMES", 6)
    check, part = decode_nvdec.check_nvdec, PartResult("checks", "Checks")
    part.metric("wrong", "wrong", "%")
    checks.decode_streams_not_given_to_dali(part, "")
    assert [part.candidates[kind]["metrics"]["wrong"] for kind in ("AV1", "interlaced")] == [[0.0], [0.0]]
    assert decode_nvdec.check_nvdec is check
