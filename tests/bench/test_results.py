"""The results document: kept whole, refused when foreign, and filled also when something fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.core import command, results
from headrace.bench.core.results import MAX_BYTES, Metric, Part, Run, Samples
from headrace.dataio import cli
from headrace.dataio.core.errors import UsageError

NAMES = st.text("abc µ|<>&\"'", min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SAMPLES = st.builds(
    Samples,
    metrics=st.dictionaries(NAMES, st.lists(NUMBERS, max_size=4), max_size=3),
    errors=st.lists(NAMES, max_size=2),
    histograms=st.dictionaries(NAMES, st.lists(st.tuples(NUMBERS, st.integers(0, 2**40)), max_size=3), max_size=2),
)
METRICS = st.builds(
    Metric,
    title=NAMES,
    unit=NAMES,
    better=st.sampled_from(["higher", "lower"]),
    goal=st.none() | NUMBERS,
    limit=st.none() | NUMBERS,
    axes=st.dictionaries(NAMES, NAMES | NUMBERS, max_size=2),
)
PARTS = st.builds(
    Part,
    name=NAMES,
    status=st.sampled_from(["done", "failed", "interrupted", "skipped"]),
    metrics=st.dictionaries(NAMES, METRICS, max_size=3),
    candidates=st.dictionaries(NAMES, SAMPLES, max_size=3),
)


@given(
    st.builds(Run, command=st.lists(NAMES), started=NAMES, environment=st.just({}), parts=st.lists(PARTS, max_size=2))
)
def test_what_is_written_is_read_again(run: Run) -> None:
    assert results.decode(results.encode(run).encode(), "it") == run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no results"),
        ("[]", "holds no results"),
        ('{"environment": {}}', "holds no results"),
        ('{"format": "headrace-bench", "version": 2}', "format 2, this program knows up to 1"),
        ('{"format": "headrace-bench", "version": 1, "command": 7}', "holds no results .*command"),
    ],
)
def test_what_is_no_results_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "it.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"it.json.*{message}"):
        results.read(path)


def test_a_file_too_large_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UsageError, match="at most 64"):
        results.read(path)
    with pytest.raises(UsageError, match="cannot be read"):
        results.read(tmp_path / "absent.json")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"pipe is not a regular file"):
        results.read(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"null is not a regular file"):
        results.read(Path("/dev/null"))


def test_the_environment_names_the_machine_and_no_person(tmp_path: Path) -> None:
    found = results.environment(tmp_path)
    assert {"cpu", "cpus", "memory_gib", "kernel", "python", "file_system", "packages"} <= set(found)
    assert found["cpus"] == len(os.sched_getaffinity(0))
    text = json.dumps(found)
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text
    assert results.differences(found, found) == []
    assert results.differences(found, {**found, "cpus": 999}) == [f"cpus: {found['cpus']} / 999"]


def test_a_machine_without_any_load_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.3, 0.5))
    assert results.environment(tmp_path)["load_before"] == 0.0


def test_a_part_that_raises_is_in_the_results_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fill(job: command.Job, part: Part) -> None:
        part.metrics = {"x": Metric("x", "s")}
        part.candidates["ours"] = Samples({"x": [1.0]})
        (job.scratch / "left").touch()
        raise RuntimeError("the disk went away")

    path = tmp_path / "out" / "it.json"
    assert command.benchmark("x", "about")(fill)(["-o", str(path), "--directory", str(tmp_path)]) == 1
    (part,) = results.read(path).parts
    assert (part.status, part.why) == ("failed", "RuntimeError: the disk went away")
    assert part.candidates["ours"].metrics["x"] == [1.0], "its measurements were lost"
    assert "**failed**: RuntimeError" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"], "scratch was left behind"


def test_a_place_for_results_that_is_none_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    def fill(*_: object) -> None:
        raise AssertionError("it was measured")

    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a folder"):
        command.benchmark("x", "about")(fill)(["-o", str(tmp_path)])
    with pytest.raises(UsageError, match=r"writing .*/it\.json"):
        command.benchmark("x", "about")(fill)(["-o", str(tmp_path / "file" / "it.json")])
    assert {entry.name for entry in tmp_path.iterdir()} == {"file"}


def test_a_place_for_scratch_that_is_none_is_said_with_the_option_that_gives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object) -> None:
        raise AssertionError("it was measured")

    for place, why in ((tmp_path / "absent", "No such file"), (Path(__file__), "Not a directory")):
        with pytest.raises(UsageError, match=f"no folder can be made in {place}: {why}.*--directory"):
            command.benchmark("x", "about")(fill)(["--directory", str(place)])
    assert cli.main(["bench", "all", "-o", f"{__file__}/x"]) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    """A real Ctrl-C, or a scheduler's signal, to the real command in the middle of a sweep."""
    path = tmp_path / "it.json"
    bench = [sys.executable, "-m", "headrace.dataio.cli", "bench", "store", str(tmp_path / "data")]
    options = ["--sizes", "4KiB", "--threads", "1", "--operations", "get", "--seconds", "0.1", "--rounds", "9999"]
    (tmp_path / "data").mkdir()
    process = subprocess.Popen(
        [*bench, *options, "--duration", "1e6", "-o", str(path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    until = time.monotonic() + 60
    while lines.count("headrace") < 2 and time.monotonic() < until:
        lines.append(process.stderr.readline().strip())
    process.send_signal(number)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 130, out
    (part,) = results.read(path).parts
    assert part.status == "interrupted"
    assert part.candidates["headrace"].metrics["get_4096_x1"][0] > 0
    assert not list((tmp_path / "data").iterdir()), "the objects of the sweep were left behind"


def test_results_go_into_a_pipe_that_stays_one(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert command.benchmark("x", "about")(lambda *_: None)(["-o", str(pipe)]) == 0
    reader.join()
    assert json.loads(read[0])["format"] == "headrace-bench"
    assert pipe.is_fifo()
