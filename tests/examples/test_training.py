"""The programs of examples/ that train in their own loop: a run that is killed continues exactly."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.dataio import index
from headrace.loaders import Loader, Npy
from tests.support import lerobot_set
from tests.support.example_runs import ROOT, killed_at_last, ranks_of, run, run_ranks, start, steps_of
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def media(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images and videos, and an index of them: "set"."""
    folder = tmp_path_factory.mktemp("media")
    for kind in ("images", "videos"):
        shutil.copytree(raw / kind, folder / "files" / kind)
    index(folder / "files", folder / "set").close()
    return folder


def write_latents(files: Path, dataset: Path) -> int:
    """Write the latents of every second sample next to its media, and return their number."""
    example = runpy.run_path(str(ROOT / "examples" / "latents_dit.py"))
    fields = {"video": example["FIELDS"]["video"]}
    kept = dict[str, torch.Tensor]()
    with Loader(str(dataset), fields=fields, buckets=example["SHAPES"], evaluate=True, trust_mounts=True) as loader:
        for batch in loader:
            kept |= dict(zip(batch["key"], example["encode"](batch["video"]), strict=True))
    chosen = sorted(kept)[::2]
    for key in chosen:
        np.save(files / f"{key}.latent.npy", kept[key].numpy())
    return len(chosen)


def test_stored_latents_are_used_and_the_others_are_encoded() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "latents_dit.py"))
    batch = {"video": torch.zeros(2, 1, 3, 64, 64, dtype=torch.uint8), "latent.present": torch.tensor([True, False])}

    def latents_of(stored: torch.Tensor | None) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        torch.manual_seed(0)
        example["loss_of"](lambda noisy, *_: seen.append(noisy) or noisy, batch | {"latent": stored, "caption": []})
        return seen[0]

    encoded, given = latents_of(None), latents_of(torch.full((2, 1, 4, 8, 8), 5.0))
    assert torch.equal(encoded[1], given[1])
    assert not torch.isclose(encoded[0], given[0]).any()


def losses(lines: dict[int, str]) -> tuple[list[float], list[str]]:
    """The losses of a run, and the rest of its lines."""
    parts = [line.split(" ", 2)[1:] for _, line in sorted(lines.items())]
    return [float(loss) for loss, _ in parts], [rest for _, rest in parts]


def test_a_diffusion_transformer_learns_from_pixels_and_latents_and_resumes_exactly(
    media: Path, tmp_path: Path
) -> None:
    def arguments(dataset: Path, name: str, steps: int) -> list[Any]:
        return ["latents_dit.py", dataset, tmp_path / name, "--steps", steps, "--save-every", 2]

    copy, latents = tmp_path / "files", tmp_path / "set"
    shutil.copytree(media / "files", copy)
    written = write_latents(copy, media / "set")
    index(copy, latents).close()
    with Loader(str(latents), 1, fields={"latent": Npy("latent.npy")}, evaluate=True, trust_mounts=True) as loader:
        assert len(list(loader)) == written > 20
    whole = steps_of(run(tmp_path / "whole.log", *arguments(latents, "whole", 8)))
    pixels = steps_of(run(tmp_path / "pixels.log", *arguments(media / "set", "pixels", 2)))
    found, expected = losses(whole), losses(pixels)
    assert found[0][:2] == pytest.approx(expected[0], rel=1e-4)
    assert found[1][:2] == expected[1]
    shapes = {line.split("clips ")[1].split(") ")[0] for line in whole.values()}
    assert shapes == {"(32, 1, 3, 64, 64", "(4, 8, 3, 64, 64", "(4, 8, 3, 48, 80"}
    log = tmp_path / "killed.log"
    with killed_at_last(start(log, *arguments(latents, "killed", 10_000))):
        wait_for(lambda: list((tmp_path / "killed").rglob("COMMIT")), 200)
    last = max(steps_of(log.read_text()), default=0)
    again = steps_of(run(tmp_path / "again.log", *arguments(latents, "killed", max(8, last))))
    assert min(again) > 1  # it continued after a saved step
    assert all(again[step] == whole[step] for step in again if step in whole)


def test_video_is_trained_on_four_ranks_and_continued_on_two_after_a_kill(raw: Path, tmp_path: Path) -> None:
    def arguments(runs: str, steps: int) -> Any:
        return ["fsdp2_video.py", raw / "videos-set", tmp_path / runs, "--steps", steps, "--save-every", 2]

    with ranks_of(tmp_path / "killed.log", 4, *arguments("runs", 10_000)):
        wait_for(lambda: list((tmp_path / "runs").rglob("COMMIT")), 200)
    killed = steps_of((tmp_path / "killed.log").read_text())
    last = max(killed) + 2
    again = steps_of(run_ranks(tmp_path / "again.log", 2, *arguments("runs", last)))
    assert last not in killed
    assert min(again) > 1  # it continued after a saved step
    whole = steps_of(run_ranks(tmp_path / "whole.log", 2, *arguments("whole", last)))

    def read(line: str) -> tuple[str, float]:
        return line.split("keys ")[1], float(line.split()[1])

    for found in (killed, again):
        for step, line in found.items():
            assert read(line)[0] == read(whole[step])[0]
            assert read(line)[1] == pytest.approx(read(whole[step])[1], rel=2e-2)  # sums of bfloat16, in another order


def test_a_bucket_is_looked_at_and_trained_on_where_it_lies(raw: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (raw / "videos").iterdir()}
    page = tmp_path / "preview.html"
    output = run(
        tmp_path / "log", "bucket_in_place.py", f"{raw}/videos/*.mp4", tmp_path / "set", "--page", page, "--steps", 3
    )
    assert "9 samples, " in output
    assert "4 samples where width > height: clip 1, clip 3, clip 5 ..." in output
    assert sorted(steps_of(output)) == [1, 2, 3]
    assert page.read_text().count("<img") >= 4
    assert {path: path.stat().st_mtime_ns for path in (raw / "videos").iterdir()} == before


def test_a_policy_is_trained_on_two_cameras_and_continued(tmp_path: Path) -> None:
    lerobot_set.write(tmp_path / "robot", lerobot_set.LeRobotSet(lengths=(20, 23, 31, 12)))
    index(tmp_path / "robot", tmp_path / "set").close()

    def arguments(name: str, steps: int) -> list[object]:
        return [tmp_path / "set", tmp_path / f"{name}-runs", "--steps", steps, "--save-every", 2]

    output = run(tmp_path / "log", "robot_cameras.py", *arguments("whole", 7), "::", *arguments("parts", 4))
    whole = steps_of(output)  # it compares the first four steps, too
    assert sorted(whole) == list(range(1, 8))
    again = steps_of(run(tmp_path / "again.log", "robot_cameras.py", *arguments("parts", 7)))
    assert again == {step: whole[step] for step in (5, 6, 7)}


def test_the_notebook_looks_into_a_dataset_and_a_run(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    with Checkpointer(tmp_path / "runs", run="dit") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": {"weight": torch.full((3, 2), float(step))}}).result(60)
    notebook = json.loads((ROOT / "examples/look_inside.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    places = {"s3://bucket/dataset": str(raw / "videos-set"), "s3://bucket/runs": str(tmp_path / "runs")}
    assert all(place in cells[0] for place in places)
    for place, local in places.items():
        cells[0] = cells[0].replace(place, local)
    scope: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell, "look_inside.ipynb", "exec"), scope)
    assert len(scope["wide"]) == 4
    assert scope["batch"]["video"].shape == (2, 4, 3, 64, 64)
    assert scope["names"] == ["model/weight"]
    assert [change.name for change in scope["found"].changed] == ["model/weight"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
