"""The dispatcher: starts quickly, finds commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.dataio import cli
from headrace.dataio.core.errors import ConflictError, HeadraceError


def _command(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int = 0) -> None:
    """Make `headrace try` a command that raises `error` or returns `code`."""

    def run(_: Sequence[str]) -> int:
        if error is not None:
            raise error
        return code

    monkeypatch.setitem(cli.COMMANDS, "try", ("tests:try", "a command of this test"))
    monkeypatch.setattr(cli, "_load", lambda _: run)


def test_help_imports_neither_torch_nor_pyarrow_nor_any_room() -> None:
    program = (
        "import sys\nfrom headrace.dataio.cli import main\ncode = main(['--help'])\n"
        "heavy = {'torch', 'pyarrow', 'numpy', 's3fs', 'av', 'loaders', 'checkpoint', 'bench', 'headrace.dataio.store'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\nraise SystemExit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("module", ["headrace", "headrace.dataio.cli"])
def test_the_installed_command_answers(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("headrace ")


def test_without_a_command_the_usage_is_shown_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: headrace" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shells_completion_knows_the_options_of_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*cli.COMMANDS, "--trust-mounts", "--keys-from", "--certify", "--socket"))
    assert cli.main(["--print-completion", "fish"]) == 2


def test_an_unknown_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'\n  next: see headrace --help" in capsys.readouterr().err
    assert cli.main(["pakc"]) == 2
    assert "no command 'pakc' (did you mean pack?)" in capsys.readouterr().err


WRONG = [
    "ckpt ls",
    "ckpt fly",
    "pack x",
    "order x --batch 0",
    "bench fly",
    "bench all --minutes x",
    "quarantine --fly",
    "fly",
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_an_error_like_others_also_as_json(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(wrong.split()) == 2
    said = capsys.readouterr()
    assert re.fullmatch(r"headrace[a-z ]*: error: .*\n  next: see headrace [a-z ]*--help\n", said.err)
    assert said.out == ""
    assert cli.main([*wrong.split(), "--json"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == "usage"
    assert said.err == ""


def test_the_commands_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _command(monkeypatch, None, 1)
    assert cli.main(["try"]) == 1


def test_an_error_becomes_message_hint_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command(monkeypatch, ConflictError("step 3 is taken", hint="restore first"))
    assert cli.main(["try"]) == 5
    said = capsys.readouterr()
    assert said.err == "headrace try: error: step 3 is taken\n  next: restore first\n"
    assert said.out == ""


def test_with_json_an_error_is_an_object_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command(monkeypatch, ConflictError("step 3 is taken", hint="restore first"))
    assert cli.main(["try", "--json"]) == 5
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "error": {"code": "conflict", "message": "step 3 is taken", "hint": "restore first"}
    }
    assert said.err == ""


def test_any_other_error_is_a_bug_and_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    _command(monkeypatch, ValueError("secret=hunter2"))
    assert cli.main(["try"]) == HeadraceError.exit_code == 70
    said = capsys.readouterr().err
    assert "bug in Headrace: ValueError" in said
    assert "HEADRACE_DEBUG=1" in said
    assert "hunter2" not in said
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    with pytest.raises(ValueError):
        cli.main(["try"])


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    _command(monkeypatch, KeyboardInterrupt())
    assert cli.main(["try"]) == 130


def test_a_time_limit_ends_a_command_as_an_interrupt_does() -> None:
    program = (
        "import time\nfrom dataio import cli\n"
        "def wait(_):\n"
        "    try: print('ready', flush=True); time.sleep(60)\n"
        "    finally: print('tidied')\n"
        "cli._load = lambda _: wait\n"
        "raise SystemExit(cli.main(['pack']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.communicate(timeout=150) == (b"tidied\n", b"headrace pack: interrupted\n")
    assert process.returncode == 130


def test_an_interrupt_while_a_command_is_imported_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(_: str) -> Sequence[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", load)
    assert cli.main(["ckpt", "ls"]) == 130
    assert capsys.readouterr().err == "headrace ckpt: interrupted\n"


@pytest.mark.parametrize("command", ["--help", "--version", "bench --help"])
def test_a_full_disk_behind_standard_output_is_said_and_is_no_bug(command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m headrace.dataio.cli {command} > /dev/full"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    assert done.returncode == 6
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", ">&- <&-"])
def test_a_closed_standard_output_is_no_bug_and_no_file_takes_its_place(closed: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    show = "import os, sys; from headrace.dataio import cli; code = cli.main(['--version']); open(sys.argv[1], 'x')"
    program = f"{show}; print(code, sys.stdout.fileno(), file=sys.stderr); sys.stdout.buffer.write(b'x')"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{program}" {said} {closed}'], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr, said.read_text()) == (0, "0 1\n", "")


def test_what_the_machine_refuses_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command(monkeypatch, OSError(errno.EROFS, os.strerror(errno.EROFS), "/mnt/cache"))
    assert cli.main(["try"]) == 2
    assert "/mnt/cache: Read-only file system\n  next: check the owner" in capsys.readouterr().err
    assert cli.main(["try", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "access_denied"
    _command(monkeypatch, OSError(errno.EBADF, os.strerror(errno.EBADF)))
    assert cli.main(["try"]) == 70


def test_a_process_without_memory_says_so_and_whose_limit_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))):
        _command(monkeypatch, error)
        assert cli.main(["try", "--json"]) == 6
        said = json.loads(capsys.readouterr().out)["error"]
        assert said["message"].startswith("this process")
        assert "ulimit -v" in said["hint"]


def test_what_the_locale_has_no_letters_for_is_escaped() -> None:
    program = (
        "import sys; from headrace.dataio import cli\n"
        "cli._load = lambda _: lambda args: print(*args) or 0; cli.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "ls", "ünï", "日本"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.stdout, done.returncode) == ("\\xfcn\\xef \\u65e5\\u672c\n", 0), done.stderr


def test_a_reader_that_went_away_is_no_error() -> None:
    program = f"{sys.executable} -m headrace.dataio.cli doctor /tmp --json --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "0"
    assert "Traceback" not in done.stderr


# --- a command that takes long, on a terminal

LONG = """
import sys, threading
from headrace.dataio import cli
def wait(_):
    threading.Event().wait({seconds})
    print("the result")
    return 0
cli._load = lambda _: wait
cli.Waiting.__init__.__defaults__ = (0.05,)
sys.exit(cli.main(["{command}"]))
"""


def on_terminal(command: str, seconds: float) -> tuple[str, str]:
    """What a command writes to standard output, a pipe, and to standard error, a terminal."""
    terminal, other_end = pty.openpty()
    try:
        program = LONG.format(command=command, seconds=seconds)
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=other_end, timeout=120)
        os.set_blocking(terminal, False)
        try:
            shown = os.read(terminal, 65536).decode()
        except BlockingIOError:
            shown = ""
    finally:
        os.close(terminal)
        os.close(other_end)
    assert done.returncode == 0, shown
    return done.stdout.decode(), shown


def test_a_command_that_takes_long_shows_on_a_terminal_that_it_is_working() -> None:
    said, shown = on_terminal("pack", 0.5)
    assert said == "the result\n"
    assert shown.startswith("\rheadrace pack: working, 0 s")
    assert shown.endswith("\r\x1b[K"), "the line is removed before the result"


def test_a_command_that_speaks_for_itself_is_not_spoken_over() -> None:
    assert on_terminal("bench", 0.5) == ("the result\n", "")


def test_without_a_terminal_streams_are_left_alone() -> None:
    before = sys.stdout, sys.stderr
    with cli.Waiting("headrace pack", 0.0):
        assert (sys.stdout, sys.stderr) == before


def test_what_the_command_writes_first_removes_the_line_also_in_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    waiting = cli.Waiting("headrace pack", 0.001)
    with waiting:
        while "working" not in terminal.getvalue():
            time.sleep(0.001)
        waiting._pid += 1  # as in a child
        waiting.end()
        assert not terminal.getvalue().endswith("\x1b[K")
        waiting._pid -= 1
        print("a warning", file=sys.stderr)
        assert terminal.getvalue().endswith("\r\x1b[Ka warning\n")
    assert sys.stderr is terminal
