"""Progress bars: followed as they move, kept as they were last, and never a flood."""

from __future__ import annotations

import json

import pytest

from gpucloud.cli.render import onlookers, output
from gpucloud.domain.node.output import Bars
from gpucloud.usecases.jobstore.records import LogPart
from tests.unit.test_log_reading import MIB, jobs, kept, reader, take, told
from tests.unit.test_shown import Terminal

__all__ = ["jobs", "reader", "told"]

# As tqdm 4.67 writes two loops, one within the other, and a line by `tqdm.write`.
NESTED = (
    "\repoch:   0%|          | 0/2\n\rstep:   0%|          | 0/2\x1b[A\n\rstep:  50%|#####     | 1/2\x1b[A"
    "\n\r                        \x1b[A\r                    \repoch 0: loss 2.5\n\repoch:   0%|          | 0/2"
    "\repoch:  50%|#####     | 1/2\n\rstep:  50%|#####     | 1/2\x1b[A"
)


def test_a_bar_is_its_last_state_and_moves_until_its_line_ends():
    shown = Bars()
    assert (shown.feed("begun\n\r  0%|  | 0/2"), shown.moving) == ("begun\n", ("  0%|  | 0/2",))
    assert (shown.feed("\r 50%|# | 1/2"), shown.moving) == ("", (" 50%|# | 1/2",))
    assert (shown.feed("\r100%|##| 2/2\nloss 2.5\n"), shown.moving) == ("100%|##| 2/2\nloss 2.5\n", ())


def test_a_bar_within_another_is_two_rows_and_a_line_between_stands():
    shown = Bars()
    assert shown.feed(NESTED) == "epoch 0: loss 2.5\n"
    assert shown.moving == ("epoch:  50%|#####     | 1/2", "step:  50%|#####     | 1/2")
    assert shown.end() == "epoch:  50%|#####     | 1/2\nstep:  50%|#####     | 1/2\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\r\n\r\nb\n", "a\n\nb\n"),
        ("1 of 2\r2 of 2\rdone\n", "done\n"),
        ("1 of 2\r      \r\n", ""),
        ("10%\b\b\b\r20%\n", "20%\n"),
        ("\x1b[A\x1b[999999Aup\n", "up\n"),
        ("\x1b[32mgreen\x1b[0m\n", "\x1b[32mgreen\x1b[0m\n"),
    ],
)
def test_lines_stand_as_a_terminal_would_show_them_however_they_are_cut(text, lines):
    whole, letters = Bars(), Bars()
    assert whole.feed(text) == lines
    assert "".join(map(letters.feed, text)) + letters.end() == lines


def test_of_a_line_that_never_ends_a_beginning_is_kept_and_the_rest_is_counted():
    shown = Bars()
    for _ in range(300):
        assert shown.feed("x" * 10_000) == ""
    assert sum(len(row.text) for row in shown._rows) == MIB
    assert shown.feed("\nnext\n") == f"{'x' * MIB}… (1951424 more characters of this line)\nnext\n"
    assert (shown.feed("y" * 2 * MIB + "\rz"), shown.moving, shown.end()) == ("", ("z",), "z\n")


def test_of_a_line_that_never_ends_json_has_a_beginning_too(monkeypatch):
    pieces = [*[(0, b"x" * MIB)] * 3, (0, b"\nnext\n")]
    said = written(monkeypatch, pieces, follow=True, as_json=True)
    lines = [json.loads(line)["line"] for line in said.splitlines()]
    assert lines == [f"{'x' * MIB}… (2097152 more characters of this line)", "next"]


def test_a_bar_is_read_once_and_its_last_state_is_kept(jobs, reader, told):
    written = b"epoch 1\n" + b"".join(b"\r%3d%%" % n for n in range(50))
    take(reader, written)
    assert reader.offset(1, 0) == len(written)
    take(reader, b"\r 50%")
    reader.flush()  # the node is lost
    assert kept(jobs) == written + b"\r 50%"
    assert "".join(told) == (written + b"\r 50%").decode()


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        ("\r|█".encode()[:-1], 2),
        ("\r|█".encode(), 5),
        (b"\r10% hunter2hun", 5),
        (b"\r10% of hunter2hunter2", 22),
        (b"no end", 0),
        (b"\r10%" + b"x" * MIB, 1),
    ],
)
def test_a_bar_is_cut_within_no_letter_and_no_secret(reader, data, taken):
    take(reader, data[:MIB])
    assert reader.offset(1, 0) == taken


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(onlookers, "tell", lines.append)
    return lines


def test_in_plain_lines_a_bar_is_told_now_and_then_and_as_it_ended(said, monkeypatch):
    now = [100.0]
    plain = onlookers.PlainOnlooker()
    plain._moving = output.Paced(every_s=10, monotonic=lambda: now[0])
    for percent in range(100):
        now[0] += 0.5
        plain.output(1, 0, f"\r{percent}%")
    plain.output(1, 0, "\r100%\nloss 2.5\n")
    assert said == ["  | 0%", "  | 20%", "  | 40%", "  | 60%", "  | 80%", "  | 100%\n  | loss 2.5"]


def test_a_bar_that_was_told_as_it_ended_is_told_once(said, monkeypatch):
    plain = onlookers.PlainOnlooker()
    plain._moving = output.Paced(every_s=0, monotonic=lambda: 0.0)
    for text in ("\r100%", "\nloss 2.5\n", "100%\n"):
        plain.output(1, 0, text)
    assert said == ["  | 100%", "  | loss 2.5", "  | 100%"]


def test_what_an_attempt_left_moving_is_told_before_the_next_one(said):
    plain = onlookers.PlainOnlooker()
    plain._moving = output.Paced(every_s=10, monotonic=lambda: -10.0)
    plain.output(1, 0, "\r10%\r20%")
    plain.output(1, 0, "\r30%")
    plain.output(2, 0, "again\n")
    assert said == ["  | 20%", "  | 30%\n  | again"]


def part(rank=0):
    return LogPart(attempt=1, rank=rank, offset=0, key="k")


def written(monkeypatch, pieces, *, follow, as_json=False, is_terminal=False, every_s=0.0):
    for runner in output._RUNNERS:
        monkeypatch.delenv(runner, raising=False)
    out = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(output, "_is_file", lambda: False)
    monkeypatch.setattr(output, "_SHOWN_EVERY_S", every_s)
    writer = output.log_writer(follow=follow, as_json=as_json)
    for rank, data in pieces:
        writer.write(part(rank), data)
    writer.end()
    return out.written().decode()


BAR = [(0, b"one\n\r10%"), (0, b"\r20%"), (1, b"other\n\r99%"), (0, b"\r30%\ntwo\n")]


def test_followed_logs_draw_a_bar_in_one_place_below_what_stands(monkeypatch):
    assert written(monkeypatch, BAR, follow=True, is_terminal=True) == (
        "one\n\r\x1b[K10%\r\x1b[K20%\r\x1b[Kother\n\r\x1b[K20%\r\x1b[K30%\ntwo\n\r\x1b[K20%\r\x1b[K99%\r\x1b[K99%\n"
    )


def test_followed_logs_in_a_pipe_have_a_line_of_a_bar_now_and_then(monkeypatch):
    assert written(monkeypatch, BAR, follow=True) == "one\n10%\nother\n30%\ntwo\n99%\n"


def test_logs_in_a_pipe_are_all_that_was_written(monkeypatch):
    assert written(monkeypatch, BAR, follow=False) == "one\n\r10%\r20%other\n\r99%\r30%\ntwo\n"


def test_a_line_of_json_is_a_line_that_has_ended(monkeypatch):
    lines = written(monkeypatch, BAR, follow=True, as_json=True).splitlines()
    assert [(one["rank"], one["line"]) for one in map(json.loads, lines)] == [
        (0, "one"), (1, "other"), (0, "\r10%\r20%\r30%"), (0, "two"), (1, "\r99%"),
    ]  # fmt: skip


def test_a_few_bytes_that_go_down_are_not_many_rows():
    assert Bars().feed("\x1b[99B" * 10) == "\n" * 10


def test_on_a_terminal_a_traceback_names_files_by_their_paths_in_the_jobs_folder(monkeypatch):
    line = f'  File "/home/me/.gpucloud/digits/code/{"0f" * 32}/src/train.py", line 3, in main\n'
    shown = written(monkeypatch, [(0, line.encode())], follow=False, is_terminal=True)
    assert shown == '  File "src/train.py", line 3, in main\n'
    assert written(monkeypatch, [(0, line.encode())], follow=True) == line
