"""The line that a login shell is given, by the shells themselves: sshd runs `<shell> -c <line>`."""

from __future__ import annotations

import random
import string
import subprocess

import pytest

from gpucloud.adapters.hosts.group import Asking, Order
from gpucloud.adapters.ssh.shell import replacing, watched
from gpucloud.adapters.transfer.copying import Copier
from gpucloud.ports import Completed
from tests.unit.worlds import node

HOSTILE = (
    "", "'", '"; rm -rf /', "$(id)", "`id`", "a\nb", "\\", "a\\", "\\'", "*", "~", "!!", "-n", "\r\x1b[0m", "caf\udce9",
    "%1", "=1", "{a,b}", "?", "^x", "#", "&", ";", "$HOME", "\t", "(x)", "<", "a b",
)  # fmt: skip
MARKS = [pytest.mark.slow, pytest.mark.engine(name="shells")]
OTHERS = [pytest.param(shell, marks=MARKS) for shell in ("bash", "zsh", "fish", "csh", "tcsh")]


def run(shell, *argv, stays=True):
    return subprocess.run([shell, "-c", (watched if stays else replacing)(argv)], capture_output=True)


def random_words(seed):
    drawn = random.Random(seed)
    letters = string.printable + "éß漢\udcff!\\'\"\n$`"
    return tuple("".join(drawn.choices(letters, k=drawn.randint(0, 20))) for _ in range(12))


@pytest.mark.parametrize("shell", ["sh", *OTHERS])
def test_words_arrive_byte_for_byte_and_exit_codes_come_back(shell):
    for words in (HOSTILE, *((word,) for word in HOSTILE), *map(random_words, range(20))):
        for stays in (True, False):
            done = run(shell, "printf", "%s\\0", *words, stays=stays)
            assert done.stdout == b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words), words
    codes = [run(shell, "sh", "-c", script).returncode for script in ("exit 7", "kill -TERM $$", "no-such-program")]
    assert codes == [7, 143, 127]
    assert run(shell, "sh", "-c", "exit 7", stays=False).returncode == 7
    assert run(shell, "printf", "%s", "\n" * 2_000).stdout == b"\n" * 2_000  # the csh of Debian takes words of 8 kB


@pytest.mark.parametrize("shell", ["sh", *OTHERS])
def test_programs_that_hosts_are_sent_are_no_words_of_a_login_shell(shell, tmp_path):
    class Here:
        node = node("a")

        def run(self, argv, *, stdin=b"", timeout_s=30.0):
            done = subprocess.run([shell, "-c", watched(argv)], input=stdin, capture_output=True, cwd=tmp_path)
            return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

        def host(self, node):
            return self

        def close(self):
            pass

    (tmp_path / "here").write_text("x")
    assert [one.path for one in Copier(Here(), str(tmp_path)).listing(["here"]).files] == ["here"]
    (answer,) = Asking(Here).ask([Order(node=node("a"), order={"do": "nothing of the kind"})])
    assert "KeyError: 'now'" in str(answer)  # the program's own word


def test_a_login_shell_that_starts_nothing_is_named_with_the_way_to_see_it():
    class Refusing:
        def host(self, node):
            return self

        def run(self, argv, **_):
            return Completed(exit_code=1, stdout=b"This account is currently not available.\n", stderr=b"")

        def close(self):
            pass

    (error,) = Asking(Refusing).ask([Order(node=node("a"), order={})])
    assert str(error) == "a: exit code 1: This account is currently not available."
    assert "must say 3.10 or newer: if its login shell does not start that, chsh -s /bin/sh" in error.hint
