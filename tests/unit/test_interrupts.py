"""A signal means to leave, wherever it is met."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from gpucloud.cli.interrupts import Interrupts, Leave, obeyed
from gpucloud.cli.onlookers import PlainOnlooker


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
