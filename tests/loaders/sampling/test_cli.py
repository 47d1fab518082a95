"""`headrace order` on a real dataset: figures for people and for scripts."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from headrace.dataio import index
from headrace.dataio.cli import main
from headrace.dataio.shards.dataset import Dataset


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """240 texts in six tars, indexed where they are."""
    folder = tmp_path_factory.mktemp("texts")
    for shard in range(6):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(40):
                header = tarfile.TarInfo(f"{shard}-{number:03}.txt")
                header.size = 500
                tar.addfile(header, io.BytesIO(bytes(500)))
    with index(f"{folder}/*.tar", folder, workers=1) as dataset:
        assert len(dataset) == 240
    return str(folder)


def test_the_text_output_has_a_table_and_a_picture(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", url, "--batch", "12"]) == 0
    printed = capsys.readouterr().out
    assert "240 samples in 6 shards" in printed
    for line in ("moved, share of the epoch", "bits of shards in a batch", "chunks read by 8 nodes", "full shuffle"):
        assert line in printed
    assert len([line for line in printed.splitlines() if line and not set(line) - set(" ░▒▓█")]) >= 10


def test_scripts_get_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", url, "--json", "--batch", "12", "--nodes", "1,3", "--where", "bytes > 0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 240
    assert set(found["reads"]) == {"1", "3"}
    assert main(["order", url, "--json", "--no-shuffle"]) == 0
    assert json.loads(capsys.readouterr().out)["order"]["distance"] == 0


@pytest.mark.parametrize("wrong", [["--batch", "0"], ["--nodes", "1,x"], ["--nodes", "5000"]])
def test_wrong_arguments_are_refused(url: str, wrong: list[str]) -> None:
    assert main(["order", url, *wrong]) == 2


def test_a_missing_dataset_is_an_error_of_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", str(tmp_path / "none"), "--json"]) == 2
    assert "code" in json.loads(capsys.readouterr().out)["error"]


def test_several_datasets_are_measured_as_a_mixture_too(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    index(f"{url}/[01].tar", other, workers=1).close()
    assert main(["order", url, str(other), "--trust-mounts", "--batch", "12", "--temperature", "2"]) == 0
    printed = capsys.readouterr().out
    for line in ("bits of sources in a batch", "63.40%", "36.60%"):  # the roots of 240 and 80
        assert line in printed
    assert main(["order", url, str(other), "--trust-mounts", "--json", "--weights", "1,3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["samples"] for one in found["datasets"]] == [240, 80]
    assert found["mixture"]["shares"][url] == pytest.approx(0.25, abs=1e-5)
    assert found["mixture"]["away"] < found["mixture"]["drawn_away"]
    assert main(["order", url, str(other), "--trust-mounts", "--weights", "1,2,3"]) == 2
    assert main(["order", url, url]) == 2


def test_mixtures_in_buckets_are_measured_bucket_by_bucket(
    made_dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ["--bucket", "48x64", "--bucket", "64x48x8", "--frames", "4", "--batch", "2"]
    assert main(["order", made_dataset.url, *shapes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["buckets"]
    assert sum(one["share"] for one in found) == pytest.approx(1)
    assert all(one["balance"]["away"] == 0 for one in found)  # one source
    assert main(["order", made_dataset.url, *shapes]) == 0
    assert "48x64 " in capsys.readouterr().out
    assert main(["order", made_dataset.url, *shapes, "--budget", "3"]) == 2
    assert "pays for no batch" in capsys.readouterr().err


def test_datasets_without_videos_go_into_no_bucket(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", url, "--bucket", "48x64"]) == 2
    assert "holds no video to put into buckets" in capsys.readouterr().err


def test_weights_of_one_dataset_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", url, "--weights", "1"]) == 2
    assert "need several datasets" in capsys.readouterr().err
