"""Code that runs first in the processes that write to a store and are started from now on, by way of `sitecustomize`.

Those are the writer of each rank, and the keeper of a script's directory.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gpucloud.system import processes

ROOT = Path(__file__).resolve().parents[2]
_WRITERS = ("gpucloud.store.writing", "gpucloud.agent")


def place(folder: Path, code: str) -> str:
    """Write the code to the folder, and return the PYTHONPATH by which new Python processes run it."""
    folder.mkdir(parents=True, exist_ok=True)
    one_of = f"import sys\nif not {set(_WRITERS)!r}.isdisjoint(sys.orig_argv):\n"
    (folder / "sitecustomize.py").write_text(f"{one_of}{_indented(code)}")
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys([str(folder), *rest, str(ROOT)]))


def is_one() -> bool:
    """Whether this process writes for a rank."""
    return _WRITERS[0] in sys.orig_argv


def end_rank() -> None:
    """SIGKILL the rank that this process writes for, or the script whose directory it keeps, if it does either."""
    if is_one():
        os.kill(os.getppid(), signal.SIGKILL)
    elif _WRITERS[1] in sys.orig_argv:
        for pid in processes.descendants(os.getpid()):
            os.kill(pid, signal.SIGKILL)


def stop_both() -> None:
    """SIGSTOP this process, and the rank that it writes for or the writer that it has, as when a machine freezes."""
    if is_one():
        os.kill(os.getppid(), signal.SIGSTOP)
    for pid in processes.descendants(os.getpid()):
        os.kill(pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.strip().splitlines())
