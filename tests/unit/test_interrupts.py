"""A signal means to leave, wherever it is met."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpucloud.cli.commands.supervising import what_stopping_means
from gpucloud.cli.interrupts import Interrupts, Leave, obeyed
from gpucloud.cli.render.onlookers import PlainOnlooker, Unshaken
from gpucloud.cli.render.words import tell
from gpucloud.domain.checkpoint.protection import Protection, Saving
from gpucloud.domain.job.spec import CheckpointDirectory, OnNotice
from gpucloud.domain.state.state import CheckpointRef, ExitReason, JobStatus
from tests.unit.worlds import NOW, job, opened, state


def test_no_library_that_takes_every_exception_for_its_own_keeps_the_user_here() -> None:
    with pytest.raises(Leave) as left, obeyed(PlainOnlooker()), contextlib.suppress(Exception):
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.exit_code == 143


def test_a_signal_that_was_swallowed_is_obeyed_at_the_next_pass() -> None:
    interrupts = Interrupts(PlainOnlooker())
    with contextlib.suppress(BaseException):
        interrupts.press(signal.SIGINT, None)
    with pytest.raises(Leave) as left:
        interrupts.wanted_end()
    assert left.value.exit_code == 130


class Terminal:
    """A terminal that is asked; `typed` is what was typed by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
        self.typed: list[str | None] = []
        self.now = 0.0
        monkeypatch.setattr("gpucloud.cli.interrupts._typed", lambda: self.typed.pop(0) if self.typed else None)
        monkeypatch.setattr("gpucloud.cli.interrupts.time.monotonic", lambda: self.now)
        monkeypatch.setattr(Interrupts, "_can_ask", lambda _: True)
        self.interrupts = Interrupts(PlainOnlooker(), **changes)  # type: ignore[arg-type]


def test_a_question_that_nobody_answers_holds_nothing_up_and_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(monkeypatch)
    terminal.interrupts.press(signal.SIGINT, None)
    for terminal.now in (0.0, 10.0, 59.0):
        assert terminal.interrupts.wanted_end() is None
    assert capsys.readouterr().err.count("[s]top the job") == 1
    terminal.now = 60.0
    assert terminal.interrupts.wanted_end() is None
    assert "no answer: the job goes on" in capsys.readouterr().err
    terminal.interrupts.press(signal.SIGINT, None)  # asked anew, not left
    assert terminal.interrupts.wanted_end() is None
    assert "[s]top the job" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "end"), [("s", ExitReason.STOPPED), ("stop", ExitReason.STOPPED), ("c", None)])
def test_what_is_answered_some_passes_later_counts(
    monkeypatch: pytest.MonkeyPatch, typed: str, end: ExitReason | None
) -> None:
    terminal = Terminal(monkeypatch)
    terminal.interrupts.press(signal.SIGINT, None)
    assert terminal.interrupts.wanted_end() is None
    terminal.typed = ["what?", None, typed]
    assert [terminal.interrupts.wanted_end() for _ in range(3)] == [None, None, end]


def test_who_may_detach_hears_first_what_that_prepays(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    terminal = Terminal(monkeypatch, detaches=lambda: "a detach prepays the machines until 19:46 UTC")
    terminal.interrupts.press(signal.SIGINT, None)
    assert terminal.interrupts.wanted_end() is None
    told, question = capsys.readouterr().err.split("\n")
    assert told == "a detach prepays the machines until 19:46 UTC"
    assert "[d]etach (it goes on), " in question


def test_a_question_is_taken_back_when_the_job_ends_meanwhile(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    terminal = Terminal(monkeypatch)
    terminal.interrupts.close()
    assert capsys.readouterr().err == ""
    terminal.interrupts.press(signal.SIGINT, None)
    terminal.interrupts.wanted_end()
    terminal.interrupts.close()
    assert capsys.readouterr().err.endswith("then Enter? \ndone before an answer: nothing is to choose\n")


def asks_and_fails() -> None:
    with obeyed(PlainOnlooker()) as interrupts:
        interrupts.press(signal.SIGINT, None)
        interrupts.wanted_end()
        raise OSError


def asks_and_is_left() -> None:
    with obeyed(PlainOnlooker()) as interrupts:
        interrupts.press(signal.SIGINT, None)
        interrupts.wanted_end()
        interrupts.press(signal.SIGINT, None)


@pytest.mark.parametrize(
    ("does", "why", "said"),
    [(asks_and_fails, OSError, "it stopped before an answer, for this:\n"), (asks_and_is_left, Leave, "")],
)
def test_what_ends_a_question_is_said_where_it_was_no_answer(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    does: Callable[[], None],
    why: type[BaseException],
    said: str,
) -> None:
    monkeypatch.setattr("gpucloud.cli.interrupts._typed", lambda: None)
    monkeypatch.setattr(Interrupts, "_can_ask", lambda _: True)
    with pytest.raises(why):
        does()
    assert capsys.readouterr().err.endswith(f"then Enter? \n{said}")


def test_a_terminal_gives_an_answer_as_one_key_and_is_as_before_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin, os.fdopen(ours, "wb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        monkeypatch.setattr(Interrupts, "_can_ask", lambda _: True)
        before = termios.tcgetattr(stdin)
        keys.write(b"s\n")  # typed ahead of the question: no answer to it
        select.select([stdin], [], [])
        with obeyed(PlainOnlooker(), detaches=lambda: None) as interrupts:
            interrupts.press(signal.SIGINT, None)
            assert interrupts.wanted_end() is None
            question = capsys.readouterr().err
            assert question == "[s]top the job (saves first), [d]etach (it goes on), or [c]ontinue? "
            keys.write(b"x")
            select.select([stdin], [], [])
            assert interrupts.wanted_end() is None
            assert capsys.readouterr().err == f"x\n{question}"
            keys.write(b"s")
            select.select([stdin], [], [])
            assert interrupts.wanted_end() is ExitReason.STOPPED
            assert termios.tcgetattr(stdin) == before


def test_an_answer_to_a_question_that_was_just_withdrawn_goes_to_no_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin, os.fdopen(ours, "wb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        monkeypatch.setattr(Interrupts, "_can_ask", lambda _: True)
        monkeypatch.setattr("gpucloud.cli.interrupts._WITHDRAWN_FOR_S", 60.0)
        before, really, typed = termios.tcgetattr(stdin), select.select, [b"c", b"\n", b"\x03"]
        with obeyed(PlainOnlooker()) as interrupts:
            interrupts.press(signal.SIGINT, None)
            assert interrupts.wanted_end() is None

            def late(reads: list[object], *rest: object) -> tuple[list[object], list[object], list[object]]:
                """Somebody types while the withdrawal is told; then time is over."""
                if not typed:
                    monkeypatch.setattr("gpucloud.cli.interrupts.time.monotonic", lambda: float("inf"))
                    return [], [], []
                if typed[0] == b"\x03":
                    typed.pop()
                    interrupts.press(signal.SIGINT, None)
                    return [], [], []
                keys.write(typed.pop(0))
                return really(reads, [], [])

            monkeypatch.setattr(select, "select", late)
        monkeypatch.undo()
        assert capsys.readouterr().err.endswith("done before an answer: nothing is to choose\n")
        assert (typed, really([stdin], [], [], 0)[0], termios.tcgetattr(stdin)) == ([], [], before)


@pytest.mark.parametrize(
    ("changes", "saving", "stopping"),
    [
        ({}, Saving.RESUME, "saves first"),
        ({"directory": CheckpointDirectory(path="out", on_notice=OnNotice.SIGTERM)}, Saving.DIRECTORY, "saves first"),
        (
            {"directory": CheckpointDirectory(path="out")},
            Saving.DIRECTORY,
            "what its script has not saved yet is lost: nothing asks it to",
        ),
        ({}, Saving.NONE, "its work is lost"),
        ({}, Saving.UNKNOWN, "saves first, if its script does"),
    ],
)
def test_what_stopping_costs_stands_in_the_question(monkeypatch, capsys, changes, saving, stopping) -> None:
    of_job = replace(job(), checkpoint=replace(job().checkpoint, **changes))
    said = what_stopping_means(of_job, Protection(saving=saving, row=""))
    assert said == stopping
    asked = f"[s]top the job ({stopping}), or [c]ontinue, then Enter? "
    monkeypatch.setattr("gpucloud.cli.interrupts._typed", lambda: None)
    monkeypatch.setattr(Interrupts, "_can_ask", lambda _: True)
    with obeyed(PlainOnlooker(), stopping=lambda: said) as interrupts:
        interrupts.press(signal.SIGINT, None)
        interrupts.wanted_end()
        assert capsys.readouterr().err == asked


SAVED = CheckpointRef(step=70, sha256="0" * 64)
OVER = opened("a", reason=ExitReason.INTERRUPTED)


@pytest.mark.parametrize(
    ("saving", "outputs", "known", "stopping"),
    [
        (
            Saving.NONE,
            ("out",),
            {"attempts": (opened("a"),)},
            "its work is lost, but for the outputs that it has written by then",
        ),
        (Saving.NOTHING, (), {"attempts": (opened("a"),)}, "its work is lost"),
        (Saving.NOTHING, (), {"attempts": (opened("a"),), "checkpoint": SAVED}, "saves first, if its script does"),
        (
            Saving.NONE,
            ("out",),
            {"attempts": (opened("a", done_at=NOW),)},
            "its script is done: its outputs come home first",
        ),
        (Saving.NONE, (), {"attempts": (opened("a", done_at=NOW),)}, "its script is done: nothing of its work is lost"),
        (Saving.NONE, (), {"status": JobStatus.SUCCEEDED}, "it has ended already"),
        (Saving.NONE, (), {}, "nothing trains yet"),
        (Saving.RESUME, (), {"attempts": (OVER,), "checkpoint": SAVED}, "nothing trains now, step 70 is kept"),
        (Saving.NONE, (), {"attempts": (OVER,)}, "nothing trains now, nothing is saved"),
    ],
)
def test_what_a_stop_costs_is_told_by_how_the_job_stands(saving, outputs, known, stopping) -> None:
    of_job = replace(job(), outputs=outputs)
    assert what_stopping_means(of_job, Protection(saving=saving, row=""), state(**known)) == stopping


def test_a_second_interrupt_leaves_while_the_question_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    terminal.interrupts.press(signal.SIGINT, None)
    assert terminal.interrupts.wanted_end() is None
    with pytest.raises(Leave):
        terminal.interrupts.press(signal.SIGINT, None)


def test_who_cannot_be_told_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(PlainOnlooker):
        def story(self, line: str) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def __enter__(self) -> PlainOnlooker:
            raise BrokenPipeError

    silenced: list[bool] = []
    monkeypatch.setattr("gpucloud.cli.render.onlookers.silence", lambda: silenced.append(True))
    with Unshaken(Closed()) as one:
        one.story("something happened")
    assert silenced == [True, True]


def test_an_answer_comes_though_what_is_told_beside_it_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    silenced: list[bool] = []
    monkeypatch.setattr("gpucloud.cli.render.words.silence", lambda: silenced.append(True))
    monkeypatch.setattr(sys.stderr, "write", gone)
    tell("something happened")
    assert silenced == [True]


STORY = """
from gpucloud.cli.render.onlookers import PlainOnlooker, Unshaken
with Unshaken(PlainOnlooker()) as shown:
    for n in range(LINES):
        shown.story(f"line {n} " + 200 * "x")
print("done")
"""


def test_a_supervisor_whose_terminal_or_pipe_takes_nothing_goes_on() -> None:
    """With a real pipe that nobody reads: a stopped terminal (Ctrl-S) or a pager takes no more either."""
    code = STORY.replace("LINES", "10000")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as story:
        assert story.stdout is not None
        assert story.stdout.readline() == "done\n"
        assert story.wait(timeout=60) == 0


def test_a_story_that_is_read_comes_whole_and_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", STORY.replace("LINES", "1000")], capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if "line" in line]
    assert [int(re.sub(r".*line (\d+) .*", r"\1", line)) for line in told] == list(range(1000))


def test_a_supervisor_whose_terminal_is_closed_goes_on(tmp_path: Path) -> None:
    """With a real pseudo-terminal: what is buffered for it must not change the exit code either."""
    code = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from gpucloud.cli.commands.supervising import onlooker
from gpucloud.domain.supervision.snapshot import Limits
from pathlib import Path
with onlooker(Limits()) as shown:
    shown.story("before")
    Path(sys.argv[1] + "/ready").touch()
    while not Path(sys.argv[1] + "/closed").exists():
        time.sleep(0.02)
    shown.story("after")
    shown.output(1, 0, "a line\\n")
Path(sys.argv[1] + "/done").touch()
"""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        for _ in range(1500):
            if (tmp_path / "ready").exists():
                break
            time.sleep(0.02)
        os.close(ours)
        (tmp_path / "closed").touch()
        assert process.wait(60) == 0
    assert (tmp_path / "done").exists()
