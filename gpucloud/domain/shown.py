"""Text of others as a terminal may show it: nothing in it moves the cursor, sets a title or reorders what is read.

What runs on a machine chooses its output, its names and its errors. A terminal obeys some of what it is given: it puts
text into the clipboard, tells what was typed, or shows other words than a file has.
"""

from __future__ import annotations

import re

_COLOUR = r"\x1b\[[0-9;:]*m"
_OBEYED = (
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # title, clipboard, links
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # strings for the terminal itself
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # cursor, screen, modes, questions
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"  # right to left; lines that are none
    r"|[\ud800-\udfff]"
)
_ANY = re.compile(_OBEYED)
_ANY_BUT_COLOURS = re.compile(f"({_COLOUR})|{_OBEYED}")


_LINE_ENDS = re.compile(r"\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
"""What any reader takes for the end of a line: a terminal, a CI runner (a lone CR), an editor."""

_COMMANDS = re.compile(r"^(\s*)(?=::)|(?<=##)(?=\[|vso\[)")
"""GitHub's commands to its runner begin with `::`, white space before it or not; older ones and Azure's with `##[` and
`##vso[`, wherever in a line they stand."""


def lines_of(text: str) -> list[str]:
    """Return the text's lines: nothing in them is obeyed, and none is a command to a CI runner.

    Such a command hides words, or has the runner listen no longer.
    """
    if text.isascii() and text.isprintable() and "::" not in text and "##" not in text:
        return [text]
    return [_COMMANDS.sub(_spoilt, plain(line)) for line in _LINE_ENDS.split(text)]


def set_off(text: str) -> str:
    """Return the text with every line but the first set off, so that none of others' begins where ours do."""
    first, *rest = lines_of(text)
    return "\n".join([first, *(line if line[:1] in ("", " ", "\t") else f"  {line}" for line in rest)])


def in_one_line(text: str) -> str:
    """Return the text with its lines one after the other in one."""
    return " ".join(line for line in lines_of(text) if line)


def _spoilt(command: re.Match[str]) -> str:
    return f"{command[1]}| " if command[1] is not None else " "


def plain(text: str) -> str:
    """Return the text without anything that a terminal obeys; lines and tabs stay."""
    return text if text.isascii() and text.isprintable() else _ANY.sub("", text)


def coloured(text: str) -> str:
    """Return output for a terminal: its colours stay, and end with it; a line that is written over is one more."""
    lines = re.sub(r"\r+\n", "\n", text).replace("\r", "\n")
    kept = _ANY_BUT_COLOURS.sub(lambda found: found[1] or "", lines)
    return f"{kept}\x1b[0m" if "\x1b[" in kept else kept
