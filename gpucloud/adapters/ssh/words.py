"""A command as every login shell hands it on: sh, bash, zsh, fish and csh read it alike.

sshd gives the command to the login shell, whichever that is. fish knows neither `$?` nor the usual escapes, csh no line
breaks within quotes, and both read some characters otherwise. So all of them are only told to become `/bin/sh`, by
one line in single quotes in which there is nothing that any of them reads: no quote, no line break, no `!`, and no
backslash before a backslash. What a word has of these, `/bin/sh` makes from its number.
"""

from __future__ import annotations

import os
import re

from gpucloud.domain.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_OF_SH = re.compile(r'(["$`])')
_MADE = {"\n": ("n", '$(printf "\\012x"); n=${n%x}'), "'": ("q", '$(printf "\\047")'),
         "\\": ("b", '$(printf "\\134")'), "!": ("e", '$(printf "\\041")')}  # fmt: skip


def watched(argv: tuple[str, ...]) -> bytes:
    """Return the command; a shell stays and reports how it ended, so that a death by signal n is exit code 128 + n."""
    return _line(argv, "{}; exit $?")


def replacing(argv: tuple[str, ...]) -> bytes:
    """Return the command in the shell's own place: nothing of ours is between a terminal and its program."""
    return _line(argv, "exec {}")


def _line(argv: tuple[str, ...], form: str) -> bytes:
    if any("\0" in word for word in argv):
        raise UsageError("a word of a command holds a NUL character")
    made = "".join(f"{name}={value}; " for char, (name, value) in _MADE.items() if any(char in w for w in argv))
    return os.fsencode(f"exec /bin/sh -c '{made}{form.format(' '.join(map(_word, argv)))}'")


def _word(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    return '"' + "".join(f"${{{_MADE[c][0]}}}" if c in _MADE else _OF_SH.sub(r"\\\1", c) for c in word) + '"'
