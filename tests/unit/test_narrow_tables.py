"""Tables on a terminal: ids are shortened and last columns folded, between words, only where there is no room."""

from __future__ import annotations

from typing import Any

import pytest

from gpucloud.cli.render.plans import labelled
from gpucloud.cli.render.words import fitted, folded

ROWS = (
    ("node", "what", "USD", "why"),
    ("i-0b2d6461083273350", "local.p2.xlarge spot", "0.0045", "taken in its first hour: not charged"),
    ("i-0e2467d3f703d7dee", "local.p2.xlarge spot", "0.0045", ""),
)


def test_nothing_is_cut_where_nobody_looks_or_there_is_room() -> None:
    whole = fitted(ROWS, None)
    assert "i-0b2d6461083273350  local.p2.xlarge spot  0.0045  taken in its first hour: not charged" in whole
    assert fitted(ROWS, 120) == whole


def test_ids_are_shortened_first() -> None:
    assert fitted(ROWS, 80).splitlines()[1:] == [
        "i-0b2d6461  local.p2.xlarge spot  0.0045  taken in its first hour: not charged",
        "i-0e2467d3  local.p2.xlarge spot  0.0045",
    ]


def test_the_last_column_goes_on_between_words() -> None:
    assert fitted(ROWS, 64).splitlines()[1:3] == [
        "i-0b2d6461  local.p2.xlarge spot  0.0045  taken in its first",
        "                                          hour: not charged",
    ]


JOBS = (
    ("job", "status", "machines", "spent"),
    ("bert-large-finetune-squad-v2-lr3e5-seed4", "waiting, nobody supervises", "16", "1234.50 of 12500.00 USD"),
    ("digits", "succeeded", "0", "0.009 of 1.00 USD"),
)


def test_other_columns_go_on_between_words_too_and_figures_stay_whole() -> None:
    assert fitted(JOBS, 88).splitlines() == [
        "job                                       status      machines  spent",
        "bert-large-finetune-squad-v2-lr3e5-seed4  waiting,    16        1234.50 of 12500.00 USD",
        "                                          nobody",
        "                                          supervises",
        "digits                                    succeeded   0         0.009 of 1.00 USD",
    ]
    assert fitted(JOBS, 80).splitlines()[1:3] == [
        "bert-large-finetune-squad-v2-lr3e5-seed4  waiting,    16        1234.50 of",
        "                                          nobody                12500.00 USD",
    ]


def test_rows_of_words_that_have_no_room_beside_each_other_are_parts_of_their_own() -> None:
    assert fitted(JOBS, 60).splitlines()[:6] == [
        "job bert-large-finetune-squad-v2-lr3e5-seed4",
        "  status    waiting, nobody supervises",
        "  machines  16",
        "  spent     1234.50 of 12500.00 USD",
        "",
        "job digits",
    ]


@pytest.mark.parametrize("width", range(50, 140))
@pytest.mark.parametrize("rows", [ROWS, JOBS])
def test_no_line_is_longer_than_its_terminal_and_every_word_is_whole(rows: Any, width: int) -> None:
    text = fitted(rows, width)
    assert max(map(len, text.splitlines())) <= width
    words = {word for row in rows[1:] for cell in row for word in cell.split() if not word.startswith("i-")}
    assert words <= set(text.split())


def test_ids_that_would_be_alike_stay_whole() -> None:
    rows = (("a", "b"), ("i-0b2d6461083273350", "x y"), ("i-0b2d6461083273351", "x y"))
    assert "i-0b2d6461083273351  x y" in fitted(rows, 20)


def test_no_rows_and_one_column_are_as_they_are() -> None:
    assert fitted((), 10) == ""
    assert fitted((("a long line of words",),), 10) == "a long line of words"


def test_columns_that_are_needed_least_go_before_a_fold() -> None:
    rows = (("node", "what", "from", "USD"), ("i-0b2d6461083273350", "local.p2.xlarge spot", "12:00:00", "0.0045"))
    assert fitted(rows, 48, ("from",)).splitlines()[1] == "i-0b2d6461  local.p2.xlarge spot  0.0045"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("next  a spot in b 3.35 USD; c spot", ["next  a spot in b", "  3.35 USD; c spot"]),
        ("  a script that says nothing", ["  a script that says", "    nothing"]),
        ("say `gpucloud train JOB --keep`, now", ["say", "  `gpucloud train JOB --keep`,", "  now"]),
        ("it failed · gpucloud logs held · mend", ["it failed ·", "  gpucloud logs held", "  · mend"]),
        ("hint: gpucloud budget small 0.27 USD", ["hint: gpucloud budget small 0.27 USD"]),
        ("averyveryverylongwordthatis one", ["averyveryverylongwordthatis", "  one"]),
        ("short", ["short"]),
    ],
)
def test_a_line_goes_on_between_words_and_no_command_is_broken(line: str, lines: list[str]) -> None:
    assert folded(line, 20).splitlines() == lines
    assert folded(line, None) == line


def test_labels_stand_alone_in_their_column() -> None:
    assert (
        labelled("plan", {"next": "a spot in b; c spot in d"}, 28)
        == "plan\n  next       a spot in b; c\n             spot in d"
    )
