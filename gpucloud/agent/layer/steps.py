"""Which command of a setup failed: `sh` tells nobody, so that a file says which one was begun last."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

_MOST_LINES = 400
_PARSED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A setup that notes each command in `file` before it runs; `commands` are their texts, in order."""

    text: str
    commands: tuple[str, ...]
    file: Path

    def last_begun(self) -> str:
        """Return the command that was begun last, in one line."""
        number = _number(self.file)
        chosen = self.commands[number] if 0 <= number < len(self.commands) else self.commands[0]
        return " ".join(line.strip().removesuffix("\\").strip() for line in chosen.splitlines()).strip()


def stepped(text: str, file: Path) -> Stepped:
    """Return the setup as it is run.

    A text that the shell would not read in pieces as it does in one (with here-documents, or unfinished) stays as it is
    and is one command.
    """
    commands = _commands(text)
    if len(commands) < 2:
        return Stepped(text=text, commands=(text.strip(),), file=file)
    place = shlex.quote(str(file))
    noted = (f"echo {number} 2>/dev/null >|{place} || :\n{command}" for number, command in enumerate(commands))
    return Stepped(text="\n".join(noted), commands=commands, file=file)


def _commands(text: str) -> tuple[str, ...]:
    lines = text.split("\n")
    if "<<" in text or len(lines) > _MOST_LINES:
        return ()
    commands: list[str] = []
    begun: list[str] = []
    for line in lines:
        begun.append(line)
        if line.endswith("\\") or not _parses("\n".join(begun)):
            continue
        if any(part.strip() and not part.lstrip().startswith("#") for part in begun):
            commands.append("\n".join(begun))
        begun = []
    return () if begun else tuple(commands)


def _parses(text: str) -> bool:
    try:
        done = subprocess.run(
            ["/bin/sh", "-n", "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PARSED_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _number(file: Path) -> int:
    try:
        return int(file.read_text().strip() or 0)
    except (OSError, ValueError):
        return 0
