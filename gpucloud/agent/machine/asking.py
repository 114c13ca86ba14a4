"""Short commands whose answer is a fact; what does not answer is not there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from gpucloud.commands import answered

_TIMEOUT_S = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/amazon/efa/bin"  # a user's may lack sbin


def environment() -> dict[str, str]:
    """Return the environment of commands: words in English, and the system's programs after the user's own path."""
    return {**os.environ, "LC_ALL": "C.UTF-8", "PATH": f"{os.environ.get('PATH', os.defpath)}:{_PATH}"}


def ask(*argv: str, timeout_s: float = _TIMEOUT_S) -> tuple[int, str]:
    """Return the exit code and what the command said; 127 where there is no such command, 124 when it hangs."""
    try:
        done = answered(argv, timeout_s=timeout_s, env=environment(), merged=True)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return 127, str(error)
    return done.exit_code, done.stdout


def answer(*argv: str) -> str:
    """Return what a command said, stripped; empty when it failed."""
    code, said = ask(*argv)
    return said.strip() if code == 0 else ""


def version(*argv: str) -> str:
    """Return the first thing that looks like a version in what a command says; empty when it failed."""
    found = re.search(r"\d+(?:\.\d+)+", answer(*argv))
    return found[0] if found else ""


def text(path: str) -> str:
    """Return a small file's text; empty when it is not there."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def names(folder: str) -> tuple[str, ...]:
    """Return what lies in the folder, sorted; nothing when it is not there."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()
