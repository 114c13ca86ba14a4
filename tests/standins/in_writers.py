"""Code that runs first in the writer processes of ranks started from now on, by way of Python's `sitecustomize`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gpucloud import processes

ROOT = Path(__file__).resolve().parents[2]


def place(folder: Path, code: str) -> str:
    """Write the code to the folder, and return the PYTHONPATH by which new Python processes run it."""
    folder.mkdir(parents=True, exist_ok=True)
    is_writer = "import sys\nWRITER = 'gpucloud.store.writing' in sys.orig_argv\n"
    (folder / "sitecustomize.py").write_text(f"{is_writer}if WRITER:\n{_indented(code)}")
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys([str(folder), *rest, str(ROOT)]))


def is_one() -> bool:
    """Whether this process writes for a rank."""
    return "gpucloud.store.writing" in sys.orig_argv


def end_rank() -> None:
    """SIGKILL the rank that this process writes for, if it does."""
    if is_one():
        os.kill(os.getppid(), signal.SIGKILL)


def stop_both() -> None:
    """SIGSTOP this process, and the rank that it writes for or the writer that it has, as when a machine freezes."""
    if is_one():
        os.kill(os.getppid(), signal.SIGSTOP)
    for pid in processes.descendants(os.getpid()):
        os.kill(pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.strip().splitlines())
