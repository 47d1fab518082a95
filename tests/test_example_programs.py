"""The programs in examples/ do what they show: runs that are killed continue exactly, answers come from one version."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.bench.core.data import write_video
from headrace.checkpoint import Checkpointer, Subscriber
from headrace.dataio import index
from tests.support import lerobot_set, nursery
from tests.support.ranks import meeting
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]
PARAMETERS = ["layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.3.bias"]


def start(log: Path, program: str, *arguments: object, **environment: str) -> nursery.Process:
    """Start a program of examples/, with its output appended to `log`."""
    environment = {"HEADRACE_SIDECAR": "off", "PYTHONWARNINGS": "ignore", **environment}
    return nursery.start_with_log(log, "tests.support.example_program", program, *map(str, arguments), **environment)


def run(log: Path, program: str, *arguments: object) -> str:
    """Run a program to its end, and return its output."""
    assert start(log, program, *arguments).wait(200) == 0, log.read_text()
    return log.read_text()


@contextmanager
def ranks_of(log: Path, world_size: int, program: str, *arguments: object) -> Iterator[list[nursery.Process]]:
    """Start a program on several ranks, as torchrun does. They are dead after the context."""
    with meeting(world_size) as place:
        ranks = [start(log, program, *arguments, **place, RANK=str(rank)) for rank in range(world_size)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(20)


def run_ranks(log: Path, world_size: int, program: str, *arguments: object) -> str:
    """Run a program on several ranks to its end, and return its output."""
    with ranks_of(log, world_size, program, *arguments) as ranks:
        assert [rank.wait(200) for rank in ranks] == [0] * world_size, log.read_text()
    return log.read_text()


def steps_of(output: str) -> dict[int, str]:
    """The lines of a run by step. A step that was done twice had the same outcome."""
    found = dict[int, str]()
    for line in output.splitlines():
        if match := re.match(r"step (\d+) (.*)", line):
            assert found.setdefault(int(match[1]), match[2]) == match[2], output
    return found


@contextmanager
def killed_at_last(process: nursery.Process) -> Iterator[None]:
    """A context after which the process is dead. It did not end by itself."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        code = process.wait(20)
    assert code == -signal.SIGKILL


def bucket(folder: Path) -> None:
    """MP4 and PNG files with captions, in folders."""
    import av

    for name in ("videos", "images"):
        (folder / name).mkdir(parents=True)
    for number in range(9):
        shades = np.random.default_rng(number).integers(0, 255, (24, 48, 80 if number % 2 else 48, 3), np.uint8)
        write_video(folder / "videos" / f"clip {number}.mp4", "libx264", shades // 4 + 90)
        (folder / "videos" / f"clip {number}.txt").write_text(f"noise, number {number}")
    for number in range(40):
        with av.open(str(folder / "images" / f"{number}.png"), "w", format="image2") as out:
            stream = out.add_stream("png", rate=1)
            stream.width, stream.height, stream.pix_fmt = 72, 64, "rgb24"
            shades = np.random.default_rng(100 + number).integers(0, 255, (64, 72, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(shades, format="rgb24")
            out.mux([*stream.encode(frame), *stream.encode(None)])


def test_a_diffusion_transformer_trains_on_loose_files_and_resumes_exactly(tmp_path: Path) -> None:
    bucket(tmp_path / "raw")

    def arguments(name: str, steps: int) -> Any:
        places = [tmp_path / "raw", tmp_path / f"{name}-dataset", tmp_path / f"{name}-runs"]
        return [tmp_path / f"{name}.log", "diffusion_transformer.py", *places, "--steps", steps, "--save-every", 3]

    def lines(name: str) -> list[str]:
        return [line for line in (tmp_path / f"{name}.log").read_text().splitlines() if line.startswith("step ")]

    run(*arguments("unbroken", 24))
    with killed_at_last(start(*arguments("killed", 10_000))):
        wait_for(lambda: len(lines("killed")) >= 5, 200)
    before = len(lines("killed"))
    assert 5 <= before < 24
    run(*arguments("killed", 24))
    unbroken = dict(line.split(" ", 2)[1:] for line in lines("unbroken"))
    again = [line.split(" ", 2)[1:] for line in lines("killed")]
    assert all(unbroken[step] == rest for step, rest in again)
    assert len(again) > before
    assert {text.split("clips ")[1].split(" keys")[0] for text in unbroken.values()} == {
        "(32, 1, 3, 64, 64)",
        "(4, 8, 3, 64, 64)",
        "(4, 8, 3, 48, 80)",
    }


def ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_each_answer_of_the_server_comes_from_one_version_also_while_publishers_die(tmp_path: Path) -> None:
    log, repository = tmp_path / "log", tmp_path / "runs"

    def publisher(versions: int) -> nursery.Process:
        return nursery.start_with_log(log, "tests.support.policy_publisher", str(repository), str(versions))

    assert publisher(1).wait(120) == 0, log.read_text()
    server = start(log, "serve_published.py", repository, "--port", 0)
    with killed_at_last(server), ThreadPoolExecutor(2) as pool:
        port = wait_for(lambda: re.search(r"serving on port (\d+)", log.read_text()), 120)[1]
        url, stop, answers = f"http://127.0.0.1:{port}", False, list[dict[str, Any]]()

        def ask_on() -> None:
            while not stop:
                answers.append(ask(f"{url}/act?observation={len(answers)}"))
                time.sleep(0.01)  # leave the processors to the publisher

        def seen_number() -> int:
            time.sleep(0.1)
            return int(ask(f"{url}/version")["number"])

        asking = [pool.submit(ask_on) for _ in range(2)]
        try:
            with killed_at_last(publisher(1000)):
                wait_for(lambda: seen_number() >= 10, 150)
            assert publisher(10).wait(120) == 0, log.read_text()
            with Subscriber(repository, "policy") as subscriber:
                last = subscriber.wait(10)
            assert last.number >= 20
            wait_for(lambda: seen_number() == last.number)
        finally:
            stop = True
        for each in asking:
            each.result(60)
    seen = {(answer["number"], answer["weights"]) for answer in answers}
    assert len({number for number, _ in seen}) == len(seen) >= 5
    with Subscriber(repository, "policy") as subscriber:
        for number, weights in sorted(seen):
            version = subscriber.at(number, 10)
            version.apply(tensors := version.empty_tensors())
            stored = [tensors[name].view(torch.uint8).numpy().tobytes() for name in PARAMETERS]
            assert hashlib.sha256(b"".join(stored)).hexdigest()[:16] == weights


def test_players_follow_the_policy_and_its_rollback(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/rl_publish.py"), str(tmp_path / "runs"), "--updates", "8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HEADRACE_SIDECAR": "off", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200
    )  # it starts processes itself
    output = done.stdout
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", output)]
    assert len(rewards) == 8
    back = re.search(r"rollback to step 16: version 7", output)
    assert back, output
    assert rewards[5] < 0.3 < 0.6 < min(rewards[4], *rewards[6:])
    assert re.search(r"player [12] has version 7, step 16", output)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with videos, pictures with classes, and recordings, and an index of each: "videos-set" and so on."""
    folder = tmp_path_factory.mktemp("raw")
    bucket(folder)
    for number in range(40):
        (folder / "images" / f"{number}.json").write_text(json.dumps({"label": number % 2}))
    (folder / "speech").mkdir()
    for number in range(24):
        samples = np.random.default_rng(number).integers(-9000, 9000, 4000 + 900 * (number % 7), np.int16)
        with wave.open(str(folder / "speech" / f"{number}.wav"), "wb") as file:
            file.setnchannels(1), file.setsampwidth(2), file.setframerate(16_000)
            file.writeframes(samples.tobytes())
    for kind in ("videos", "images", "speech"):
        index(folder / kind, folder / f"{kind}-set").close()
    return folder


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

    for run in (killed, again):
        for step, line in run.items():
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


def test_the_trainer_of_transformers_continues_at_the_next_batch(raw: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def arguments(name: str, steps: int) -> list[object]:
        places = [raw / "images-set", tmp_path / f"{name}-runs", "--output", tmp_path / name]
        return [*places, "--steps", steps, "--save-every", 3]

    def losses(output: str) -> list[str]:
        return re.findall(r"'loss': '?([\d.]+)", output)

    output = run(tmp_path / "log", "hf_trainer.py", *arguments("whole", 10), "::", *arguments("parts", 6))
    assert output.count("trained to step") == 2
    whole, first = losses(output)[:10], losses(output)[10:]
    output = run(tmp_path / "again.log", "hf_trainer.py", *arguments("parts", 10))
    assert re.search("trained to step 10, from .*checkpoint-6", output)
    assert first + losses(output) == whole
    assert len(whole) == 10


def test_lightning_continues_at_the_next_batch_of_recordings(raw: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def arguments(name: str, steps: int) -> list[object]:
        places = [raw / "speech-set", tmp_path / f"{name}-runs", "--output", tmp_path / name]
        return [*places, "--steps", steps, "--save-every", 2]

    output = run(tmp_path / "log", "lightning_audio.py", *arguments("whole", 7), "::", *arguments("parts", 4))
    whole = steps_of(output)  # it compares the first four steps, too
    assert sorted(whole) == list(range(1, 8))
    again = steps_of(run(tmp_path / "again.log", "lightning_audio.py", *arguments("parts", 7)))
    assert again == {step: whole[step] for step in (5, 6, 7)}


def test_a_policy_is_trained_on_two_cameras_and_continued(tmp_path: Path) -> None:
    lerobot_set.write(tmp_path / "robot", lerobot_set.LeRobotSet(lengths=(20, 23, 31, 12)))

    def train(name: str, steps: int) -> dict[int, str]:
        places = [tmp_path / "robot", tmp_path / "set", tmp_path / f"{name}-runs"]
        log = tmp_path / f"{name}.log"
        return steps_of(run(log, "robot_cameras.py", *places, "--steps", steps, "--save-every", 2))

    whole = train("whole", 7)
    train("parts", 4)
    assert train("parts", 7) == whole
    assert sorted(whole) == list(range(1, 8))


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
