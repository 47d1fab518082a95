"""The blocks of a page of the documentation, and a shell that runs them in order, as a reader would.

A block of Python that begins with `# NAME.py` is a file that the reader saves; another one is run at once. A block of
commands is run by bash. A block of text after one of these is what it should print: its lines, in this order, with other
lines between them. Numbers, digests and times may differ; `…` stands for any text.

A block is not run where `<!-- not run: REASON -->` stands before it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked_programs import ForkedPrograms

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:<!-- not run: (?P<mark>[^>]+?) -->\n+)?^```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$", re.S | re.M
)
_FILE = re.compile(r"# (\w+\.py)\n")
_END = "\x1eend of block "
PYTHON, SHELL = ("python",), ("console", "sh", "bash", "")


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Args:
        language: The word after the fence.
        text: The lines of the block.
        mark: Why it is not run; "" if it is.
    """

    language: str
    text: str
    mark: str

    @property
    def runs(self) -> bool:
        return not self.mark and self.language in PYTHON + SHELL


def blocks(page: Path) -> list[Block]:
    """All blocks of the page, in order."""
    return [Block(found["language"], found["text"], found["mark"] or "") for found in _FENCE.finditer(page.read_text())]


def _script(found: list[Block]) -> str:
    lines = ["set -e -o pipefail"]
    for number, block in enumerate(found):
        if block.runs and block.language in PYTHON:
            named = _FILE.match(block.text)
            lines += [
                f"cat > {named[1]} <<'END_OF_FILE'" if named else "python - <<'END_OF_FILE'",
                block.text,
                "END_OF_FILE",
            ]
        elif block.runs:
            lines.append(block.text)
        lines.append(f"echo '{_END}{number}'")
    return "\n".join(lines)


def run(page: Path, folder: Path) -> list[str]:
    """Run the page's blocks in `folder`, and return what each printed.

    Raises:
        AssertionError: A command failed. The message has the end of the output.
    """
    return run_in_one_shell([page], folder)[0]


def run_in_one_shell(several: list[Path], folder: Path) -> list[list[str]]:
    """Run the blocks of several pages, one page after the other, as a reader with one terminal does.

    Returns what each block of each page printed. Raises as `run` does.
    """
    found = [block for page in several for block in blocks(page)]
    programs = folder / "programs"
    (work := folder / "work").mkdir()
    (runtime := folder / "run").mkdir(mode=0o700)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "AWS_"))}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    environment |= {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHON_EXEC": str(programs / "python")}  # torchrun starts its ranks by it
    (script := folder / "page.sh").write_text(_script(found))
    log = folder / "log"
    with ForkedPrograms(programs):
        with log.open("wb") as out:
            bash = subprocess.Popen(
                ["bash", str(script)], cwd=work, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        try:
            code = bash.wait(240 * len(several))
        finally:  # programs that the page left in the background
            with contextlib.suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)
    text = log.read_text(errors="replace").replace(str(work), "/home/you").replace(str(folder), "/home/you")
    assert code == 0, f"{', '.join(page.name for page in several)}: exit code {code}\n{text[-3000:]}"
    printed = iter(re.split(r"\n?" + re.escape(_END) + r"\d+\n", text))
    return [[next(printed) for _ in blocks(page)] for page in several]


def _general(line: str) -> str:
    """A line without what differs from run to run: numbers, times, sizes, digests and identifiers. No bytes stay none."""
    line = re.sub(r"(?<![\d.])0 B\b", "none", line)
    line = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,}\b|\b[0-9A-Z]{26}\b", "#", line)
    line = re.sub(r"\d[\d.,:]*(?: (?:[KMGT]i?B|B|[KMGT]?B/s|ms|s)\b)?", "#", line)
    return " ".join(line.split())


def missing(told: str, printed: str) -> list[str]:
    """Lines of `told` that `printed` lacks, or has in another order."""
    lines = [_general(line) for line in printed.splitlines()]
    absent = list[str]()
    for line in told.splitlines():
        pattern = re.compile(".*".join(re.escape(part) for part in _general(line).split("…")))
        if not line.strip() or line.strip() == "…":
            continue
        for number, candidate in enumerate(lines):
            if pattern.fullmatch(candidate):
                lines = lines[number + 1 :]
                break
        else:
            absent.append(line)
    return absent


def unexpected(page: Path, printed: list[str]) -> dict[int, list[str]]:
    """Blocks of expected text, by number, with the lines that the block before did not print."""
    found = blocks(page)
    told = {
        number: missing(block.text, printed[number - 1])
        for number, block in enumerate(found)
        if block.language == "text" and number and found[number - 1].runs
    }
    return {number: lines for number, lines in told.items() if lines}
