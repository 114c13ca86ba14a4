"""Commands reach `/bin/sh` through every login shell, byte for byte."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gpucloud.adapters.ssh.shell import replacing, watched
from gpucloud.domain.node.bootstrap.facts import PROBE

SHELLS = tuple(shell for shell in ("sh", "bash", "dash", "zsh", "fish", "csh", "tcsh") if shutil.which(shell))
HOSTILE = (
    "", "'",
    '"', '"; rm -rf /', "$(id)", "`id`", "a\nb", "\n", "\\", "\\\\'", "\\n", "*", "~", "!!", "a!b", "-n", "%s", "${n}",
    "$?",     "\r\x1b[0m", "{a,b}", "[x]", "#", "; exit", "é", "x" * 3000, PROBE,
)  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
def test_words_arrive_as_they_were(shell: str) -> None:
    done = subprocess.run((shell, "-c", watched(("printf", "%s\\0", *HOSTILE))), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().split("\0")[:-1] == list(HOSTILE)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -TERM $$", 143), ("true", 0)])
def test_how_a_command_ended_is_told(shell: str, script: str, code: int) -> None:
    assert subprocess.run((shell, "-c", watched(("sh", "-c", script))), check=False).returncode == code


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_takes_its_shells_place(shell: str) -> None:
    started = subprocess.Popen((shell, "-c", replacing(("sh", "-c", "echo $$; exit 3"))), stdout=subprocess.PIPE)
    said, _ = started.communicate()
    assert (int(said), started.returncode) == (started.pid, 3)


def test_a_line_holds_nothing_that_shells_read_otherwise() -> None:
    line = watched(HOSTILE).decode()
    inner = line.removeprefix("exec /bin/sh -c '").removesuffix("'")
    assert [mark for mark in ("'", "\n", "!", "\\\\") if mark in inner] == []
