"""What `pip install headrace` brings: one name in site-packages, and a core that runs the daemon without torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.shared_folder import shared_folder

ROOT = Path(__file__).parents[1]
TRAINER = """
from pathlib import Path
import bench, checkpoint, dataio, loaders  # the trainer's own
from headrace import RNG, Checkpointer, open_store
import headrace.checkpoint, headrace.bench

here = Path(__file__).parent
for module in (bench, checkpoint, dataio, loaders):
    assert here in Path(module.__file__).parents, module
with Checkpointer(here / "repository", run="shadow", sidecar=None) as checkpointer:
    state = {"step": 1, "weights": checkpoint.weights()}
    checkpointer.save(1, state).result()
    state["weights"].zero_()
    assert checkpointer.restore(state) == 1
    assert state["weights"].tolist() == [1.0, 1.0]
    print(Path(headrace.checkpoint.__file__).parents[1])
"""


def pip(python: Path, *arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        *arguments,
        "--quiet",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def clean() -> dict[str, str]:
    """This process's environment, without the path to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = shared_folder(tmp_path_factory, "wheel", build).glob("*.whl")
    return wheel


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder), str(ROOT)]
    if Version(importlib.metadata.version("setuptools")) >= Version(
        "77"
    ):  # else pip downloads what pyproject.toml requires
        command.append("--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


class Bare:
    """A virtual environment with nothing in it but what a test installs."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin/python"
        (self.site_packages,) = folder.glob("lib/python*/site-packages")

    @classmethod
    def create(cls, folder: Path) -> Bare:
        venv.create(folder, with_pip=False)
        return cls(folder)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=clean() | variables, capture_output=True, text=True, timeout=120)

    def headrace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.python.with_name("headrace")), *arguments)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    def install(folder: Path) -> None:
        # each module is compiled when a test imports it; to compile all of them takes longer
        pip(Bare.create(folder).python, "install", "--no-deps", "--no-compile", str(wheel))

    return Bare(shared_folder(tmp_path_factory, "bare", install))


@pytest.fixture(scope="module")
def core(bare: Bare, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """The wheel and what it requires without extras, as links to this environment's packages."""
    return Bare(shared_folder(tmp_path_factory, "core", lambda folder: link(bare, Bare.create(folder))))


def link(bare: Bare, core: Bare) -> None:
    for entry in bare.site_packages.iterdir():
        (core.site_packages / entry.name).symlink_to(entry)
    script = bare.python.with_name("headrace").read_text()
    core.python.with_name("headrace").write_text(script.replace(str(bare.python), str(core.python)))
    core.python.with_name("headrace").chmod(0o755)
    (headrace,) = importlib.metadata.distributions(name="headrace", path=[str(bare.site_packages)])
    for distribution in required(headrace, {}).values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (core.site_packages / name).symlink_to(str(distribution.locate_file(name)))


def required(
    distribution: importlib.metadata.Distribution, found: dict[str, importlib.metadata.Distribution]
) -> dict[str, importlib.metadata.Distribution]:
    """All distributions that `distribution` needs without extras, by name. Asserts that this environment's versions meet what
    it requires."""
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and requirement.name not in found:
            needed = importlib.metadata.distribution(requirement.name)
            assert requirement.specifier.contains(needed.version), f"{distribution.name}: {requirement}"
            found[requirement.name] = needed
            required(needed, found)
    return found


def test_a_wheel_puts_one_name_at_the_top_of_site_packages(bare: Bare) -> None:
    names = {path.name for path in bare.site_packages.iterdir()}
    (metadata,) = (name for name in names if name.endswith(".dist-info"))
    assert names - {metadata} == {"headrace"}
    packages = {path.name for path in (bare.site_packages / "headrace").iterdir() if path.is_dir()}
    assert packages - {"__pycache__"} == {"bench", "checkpoint", "dataio", "loaders"}
    assert not any(path.is_symlink() for path in (bare.site_packages / "headrace").iterdir())
    assert (bare.site_packages / "headrace/py.typed").exists()


def test_a_trainer_with_modules_of_the_same_names_runs(bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.py").write_text("import torch\ndef weights():\n    return torch.ones(2)\n")
    for name in ("loaders", "dataio", "bench"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text(TRAINER)
    done = bare.run(sys.executable, str(tmp_path / "train.py"), PYTHONPATH=str(bare.site_packages))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bare.site_packages / "headrace")


def test_the_core_alone_has_no_torch_and_runs_the_command_and_the_daemon(core: Bare, tmp_path: Path) -> None:
    installed = {path.name for path in core.site_packages.iterdir()}
    assert not installed & {"torch", "nvidia", "pyarrow", "duckdb", "av", "s3fs", "aiohttp", "fsspec", "obstore"}
    assert "data in, checkpoints out" in core.headrace("--help").stdout
    socket = str(tmp_path / "s")
    command = [str(core.python.with_name("headrace")), "sidecar", "run", "--socket", socket, "--http-port", "off"]
    with subprocess.Popen(
        [*command, "--cache-dir", str(tmp_path / "cache"), "--cache-bytes", "16MiB"],
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        try:
            assert daemon.stderr is not None
            assert "ready on" in daemon.stderr.readline()
            status = core.headrace("sidecar", "status", "--socket", socket)
        finally:
            daemon.terminate()
        assert daemon.wait(60) == 0
    assert status.returncode == 0, status.stderr
    assert status.stdout.startswith(f"process {daemon.pid} on {socket}")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("doctor", "s3://bucket/prefix"), "s3"),
        (("pack", ".", "dataset"), "data"),
        (("bench", "loader"), "torch"),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(core: Bare, arguments: tuple[str, ...], extra: str) -> None:
    done = core.headrace(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"next: pip install 'headrace[{extra}]'" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "from headrace import VideoLoader",
        "from headrace.checkpoint.dcp import RepositoryWriter",
        "import headrace.checkpoint.dcp; headrace.checkpoint.dcp.RepositoryReader",
    ],
)
def test_a_public_name_whose_package_is_missing_names_the_extra(core: Bare, line: str) -> None:
    done = core.run(str(core.python), "-c", line)
    assert done.stderr.rstrip().endswith("torch is not installed (pip install 'headrace[torch]')")


def test_the_page_about_installation_names_every_extra_and_the_packages_that_it_adds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = {"": project["dependencies"], **project["optional-dependencies"]}
    page = (ROOT / "docs" / "howto" / "install.md").read_text()
    assert {"", *re.findall(r"headrace\[([\w-]+)\]", page)} == set(extras)
    rows = re.findall(r"^\| `headrace(?:\[([\w-]+)\])?` \|[^|]*\|([^|]*)\|[^|]*\|$", page, re.MULTILINE)
    assert len(rows) == 10
    for extra, adds in rows:
        added = {Requirement(line).name for line in extras[extra]} - {"headrace"}
        assert added <= set(re.findall(r"[\w-]+", adds)), extra
