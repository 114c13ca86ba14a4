"""What `gpucloud ssh JOB COMMAND` runs."""

from __future__ import annotations

import pytest

from gpucloud.cli.commands.reaching import shell_line


@pytest.mark.parametrize(
    ("typed", "run"),
    [
        ((), ()),
        (("hostname",), ("hostname",)),
        (("/usr/bin/nvidia-smi",), ("/usr/bin/nvidia-smi",)),
        (("pwd; ls",), ("sh", "-c", "pwd; ls")),
        (("$HOME/run",), ("sh", "-c", "$HOME/run")),
        (("echo", "a b; c"), ("echo", "a b; c")),
    ],
)
def test_one_word_that_is_more_than_a_name_is_a_shell_line(typed: tuple[str, ...], run: tuple[str, ...]) -> None:
    assert shell_line(typed) == run
