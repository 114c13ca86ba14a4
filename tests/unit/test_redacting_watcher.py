"""What onlookers are told: no secret, and nothing that cannot be written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpucloud.usecases.supervise.session import RedactingWatcher


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("key=secret", "key=******"),
        ("a node's JSON may hold half a letter: \ud800 secret", "a node's JSON may hold half a letter: \ufffd ******"),
        ("a byte that is no letter: \udcff", "a byte that is no letter: \ufffd"),
    ],
)
def test_whatever_a_machine_says_is_told_without_secrets(line: str, shown: str) -> None:
    told: list[str] = []
    RedactingWatcher(SimpleNamespace(story=told.append), (b"secret",)).story(line)  # type: ignore[arg-type]
    assert told == [shown]
