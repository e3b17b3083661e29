"""How far a long run has come: a bar on a terminal, lines elsewhere, and nothing of either on stdout."""

import os
import pty
import sys
import termios
from pathlib import Path

import pytest

from foredraft.inference.evaluation import progress
from tests.support.processes import end, forking_python, start

SHORT = """
import itertools, sys, types
from foredraft.inference.evaluation import progress

progress.FIRST = progress.EVERY = 0.0
progress.time = types.SimpleNamespace(perf_counter=itertools.count(0, 0.01).__next__)  # whatever the machine does meanwhile
for number in progress.track(range(3), "counting", "numbers"):
    progress.report(f"number {number}", sys.stdout)
"""


def test_lines_where_there_is_no_terminal(tmp_path: Path):
    ended = end(start(sys.executable, "-c", SHORT, cwd=tmp_path))
    assert ended.out == "number 0\nnumber 1\nnumber 2\n"
    assert "\r" not in ended.err and len(ended.err.splitlines()) == 3
    assert ended.err.startswith("counting: 1 of 3 numbers, ") and ended.err.rstrip().endswith("/s, 00:00 left")


def test_a_bar_on_a_terminal(tmp_path: Path):
    python = forking_python()
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    child = os.fork()
    if child == 0:
        os.dup2(terminal, 2)
        os.dup2(os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY), 1)
        os.environ["PYTHONPATH"] = str(Path(progress.__file__).parents[2])
        os.execv(python, [python, "-c", SHORT])
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(main, 4096):
            shown += part
    except OSError:  # Linux: the terminal is closed
        pass
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "out").read_text() == "number 0\nnumber 1\nnumber 2\n"
    bars = shown.decode().split("\r")
    assert "\n" not in shown.decode() and bars[-1] == ""  # it is removed at the end
    assert any("counting: " in bar and "2/3 [" in bar and "numbers/s]" in bar for bar in bars)


def test_the_rate_is_that_of_this_run(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    done = progress.Progress("answering", 100, "rows", done=40)
    clock[0] = 10.0
    done.add(20, "half of them kept")
    assert done.line() == "answering: 60 of 100 rows, 2.0/s, 00:20 left"


def test_lines_become_rare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Check that a day of work takes some hundred lines."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    work = progress.Progress("working")
    for _ in range(86400):
        clock[0] += 1.0
        work.add()
    assert 100 < len(capsys.readouterr().err.splitlines()) < 300


def test_only_the_first_process_reports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "1")
    progress.report("here")
    assert capsys.readouterr().err == ""
