"""The blocks of the pages for one task run in this process, with small data in place of what the pages name.

A block that needs more than a laptop is marked on the page, and counted here.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio import verify
from headrace.dataio.sidecar import settings
from tests.support import pages
from tests.support.page_runs import PageRun, fill_bucket, opened, run_blocks
from tests.support.page_situations import CHANGES, FIRST_SAVES, IN_A_BUCKET, SITUATIONS
from tests.support.shared_folder import shared_folder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HOWTO = pages.ROOT / "docs" / "howto"
PARTLY = {"frameworks": "tests/test_frameworks_page.py"}
"""Pages whose blocks need small models in place of those of the Hub, and are stopped → the test that runs them."""
RUN = sorted(page for page in HOWTO.glob("*.md") if page.stem not in PARTLY and pages.blocks(page))
NEEDS = {"trainers": ("accelerate",), "trackers": ("mlflow", "tensorboard"), "versions": ("duckdb",)}
"""Packages of extras that a page needs."""
NOT_RUN = {
    "installs packages": 4,
    "needs two datasets with equal keys": 1,
    "needs VAST": 1,
    "needs a cluster of Ray": 1,
    "needs a dataset of the Hub": 1,
    "needs a store with credentials of its own": 1,
    "needs an account of W&B": 1,
    "needs litdata": 2,
    "needs megatron-energon": 1,
    "needs mosaicml-streaming": 2,
    "needs the state of a trainer": 1,
    "needs the disks of a node": 1,
    "needs the package pylance": 1,
    "needs vLLM": 2,
    "takes half an hour": 1,
    "the folder of the block before has no such file": 1,
}
"""Blocks that are shown and not run, by reason, on all pages of the site."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bucket of all pages. A page gets hard links to its files."""
    return shared_folder(tmp_path_factory, "pages", fill_bucket)


@pytest.fixture
def run(page: Path, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRun]:
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    bucket, folder = tmp_path / "bucket", tmp_path / "here"
    shutil.copytree(filled, bucket, copy_function=os.link)
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    monkeypatch.setenv("HEADRACE_QUARANTINE", str(tmp_path / "quarantine"))
    monkeypatch.setenv("HEADRACE_EVENTS", "")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with opened(page, bucket, folder, first_saves=page.stem in FIRST_SAVES) as prepared, prepared.stack:
        yield prepared


def run_page(page: Path, run: PageRun) -> None:
    SITUATIONS.get(page.stem, lambda run: None)(run)
    run_blocks(run, pages.blocks(page), CHANGES.get(page.stem))


@pytest.mark.parametrize("page", [page for page in RUN if page.stem not in IN_A_BUCKET], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, run: PageRun) -> None:
    run_page(page, run)
    if page.stem == "looking-after":
        assert not verify(run.bucket / "ds").damaged, "the page repairs it"
    if page.stem == "damaged-samples":
        assert [sample.key for sample in run.names["loader"].quarantine] == ["made_07"]


@pytest.mark.parametrize("page", [page for page in RUN if page.stem in IN_A_BUCKET], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_a_bucket(page: Path, run: PageRun, s3_url: str) -> None:
    run.places["s3://bucket"] = s3_url
    run_page(page, run)


def test_the_daemon_takes_the_settings_that_the_pages_show(tmp_path: Path) -> None:
    (toml,) = [block.text for block in pages.blocks(HOWTO / "size-a-sidecar.md") if block.language == "toml"]
    (file := tmp_path / "sidecar.toml").write_text(toml)
    assert settings.read({}, {"HEADRACE_SIDECAR_CONFIG": str(file)}).config.tier_bytes == 500 << 30
    (env,) = [
        block.text for block in pages.blocks(HOWTO / "deploy-systemd.md") if "HEADRACE_SIDECAR_CACHE_DIR" in block.text
    ]
    shown = dict(line.split("=", 1) for line in env.splitlines())
    assert shown["AWS_PROFILE"]
    tiers = settings.read({}, shown).config.cache_dir
    assert isinstance(tiers, tuple)
    assert [str(tier.path) for tier in tiers] == ["/nvme0/headrace-alice", "/nvme1/headrace-alice"]


def test_the_blocks_that_are_not_run_are_known() -> None:
    everywhere = sorted((pages.ROOT / "docs").glob("**/*.md"))
    marks = collections.Counter(block.mark for page in everywhere for block in pages.blocks(page) if block.mark)
    assert marks == NOT_RUN


def test_the_pages_that_another_test_runs_exist_and_so_does_the_test() -> None:
    for stem, where in PARTLY.items():
        assert (HOWTO / f"{stem}.md").exists()
        for path in re.findall(r"tests/[\w/.]+", where):
            assert (pages.ROOT / path).exists(), path
