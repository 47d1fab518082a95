"""The programs of examples/ that publish weights, and that follow them: each answer comes from one version."""

from __future__ import annotations

import hashlib
import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Subscriber
from tests.support import nursery
from tests.support.example_runs import killed_at_last, run, start
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process
PARAMETERS = ["layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.3.bias"]


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
    output = run(tmp_path / "log", "rl_publish.py", tmp_path / "runs", "--updates", 8)
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", output)]
    assert len(rewards) == 8
    back = re.search(r"rollback to step 16: version 7", output)
    assert back, output
    assert rewards[5] < 0.3 < 0.6 < min(rewards[4], *rewards[6:])
    assert re.search(r"player [12] has version 7, step 16", output)
