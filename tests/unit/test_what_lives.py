"""What is said of machines when the user leaves."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpucloud.cli.commands.supervising import say_what_is_left
from tests.unit.worlds import NOW, state


def test_machines_that_were_asked_for_and_not_seen_yet_are_not_denied(capsys: pytest.CaptureFixture[str]) -> None:
    say_what_is_left(replace(state(), nodes=(), paid_until=NOW + timedelta(minutes=30)), NOW)
    said = capsys.readouterr().err
    assert "no machines are alive" not in said
    assert (
        "no machine has been seen; one that was asked for last is paid until 12:30:00 UTC, then off by itself" in said
    )
    assert "`gpucloud down " in said


def test_without_an_armed_shut_off_there_are_no_machines(capsys: pytest.CaptureFixture[str]) -> None:
    say_what_is_left(replace(state(), nodes=(), paid_until=None), NOW)
    assert capsys.readouterr().err.endswith("no machines are alive\n")
