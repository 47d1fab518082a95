"""The GPU drill: wheels survive the journey in pieces, every part is in the results, and it goes on where it stopped."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import gpu_drill
from bench.core import results
from bench.drill import dmon, wheels
from bench.drill.wheels import DrillError

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
    assert wheels.install(joined, tmp_path / "site") == [path.name for path in made]
    done = subprocess.run(
        [sys.executable, "-c", "import drilltest2; print(len(drilltest2.DATA), drilltest2.__file__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["9000", str(tmp_path / "site" / "drilltest2.py")], done.stderr


def test_a_checkout_that_is_not_installed_has_a_version(tmp_path: Path) -> None:
    wheels.register(gpu_drill.ROOT / "pyproject.toml", tmp_path / "site")
    code = "from importlib.metadata import version; print(version('millrace'))"
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


def test_missing_and_damaged_pieces_are_named(tmp_path: Path) -> None:
    wheels.split([make_wheel(tmp_path / "made", "drilltest", 5000)], tmp_path / "pieces", most=2048)
    (tmp_path / "pieces" / "0001.piece").unlink()
    damaged = tmp_path / "pieces" / "0002.piece"
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    assert wheels.missing(tmp_path / "pieces") == ["0001.piece", "0002.piece"]
    with pytest.raises(DrillError, match=r"0001\.piece, 0002\.piece; carry them again"):
        wheels.join(tmp_path / "pieces", tmp_path / "joined")


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
    with pytest.raises(DrillError, match="was not put together as it was cut"):
        wheels.join(tmp_path / "pieces", tmp_path / "joined")
    assert not list((tmp_path / "joined").iterdir())
    path.write_text("{")
    with pytest.raises(DrillError, match=r"run `gpu_drill\.py fetch`"):
        wheels.join(tmp_path / "pieces", tmp_path / "joined")


def drill(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRILL), "--dry-run", "--out", str(out), "--pieces", str(out / "none"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


def test_a_dry_run_lists_all_parts_runs_what_needs_no_gpu_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done = drill(tmp_path, "--parts", "probe,gds")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:8]] == [
        "*",
        "nvdec",
        "feed",
        "staging",
        "lazy",
        "restore",
        "*",
        "tests",
    ]
    run = results.read(tmp_path / "drill.json")
    assert [(part.name, part.status) for part in run.parts] == [("probe", "done"), ("gds", "done")]
    assert run.parts[0].notes == ["no GPU is here: torch.cuda.is_available() is False"]
    again = drill(tmp_path, "--parts", "probe,restore")
    assert "probe: done before" in again.stdout
    (_, restore) = results.read(tmp_path / "drill.json").parts
    assert restore.candidates["warm"].metrics["rate"][0] > 0
    assert not restore.failed
    assert "## Restore into the device: done" in (tmp_path / "drill.md").read_text()


def test_a_part_that_is_cut_off_or_has_no_time_left_is_in_the_results(tmp_path: Path) -> None:
    done = drill(tmp_path, "--parts", "nvdec,probe", "--limit", "6", "--budget", "8")
    assert done.returncode == 1
    cut, skipped = results.read(tmp_path / "drill.json").parts
    assert (cut.name, cut.status) == ("nvdec", "failed")
    assert "cut off after 6 s" in cut.why
    assert (skipped.name, skipped.status, skipped.why) == (
        "probe",
        "skipped",
        "the budget was spent; run the command again",
    )
    assert "## probe: skipped" in (tmp_path / "drill.md").read_text()


def test_wrong_use_is_said(tmp_path: Path) -> None:
    done = drill(tmp_path, "--parts", "guess")
    assert done.returncode == 2
    assert "no part 'guess'; there are probe" in done.stderr


def test_every_part_of_the_drill_says_what_it_shows() -> None:
    assert all(len(gpu_drill._line(name)) > 20 for name in gpu_drill.PARTS)


def test_the_table_of_nvidia_smi_is_read_by_its_own_heading() -> None:
    names, units = "# gpu  sm  mem  enc  dec  jpg  ofa", "# Idx   %    %    %    %    %    %"
    text = f"{names}\n{units}\n    0   12    3    0   88    -    0\n"
    assert dmon.parse(text * 2)["dec"] == [88, 88]
    assert dmon.parse(text).get("jpg", []) == []
    assert dmon.parse("no table") == {}
