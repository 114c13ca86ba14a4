"""The end of a file that somebody else writes, in whole lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucloud.system.wholefile import read_last_lines


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", ""),
        ("token=abc\n", "token=abc\n"),  # ten bytes: all of it
        ("the token=abc\nnext\n", "next\n"),
        ("a line\ntoken=abc\n", "token=abc\n"),  # nothing of the line before is in it
        ("one line that is far too long", ""),
    ],
)
def test_no_line_of_the_end_is_cut_at_its_beginning(tmp_path: Path, text: str, kept: str) -> None:
    (tmp_path / "log").write_text(text)
    assert read_last_lines(tmp_path / "log", 10) == kept
