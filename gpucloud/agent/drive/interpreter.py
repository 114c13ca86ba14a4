"""Which Python drives: it needs boto3 and paramiko, as a supervisor outside does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpucloud.domain.errors import NodeError

_NEEDS = ("boto3", "paramiko")
_LIMIT_S = 60.0
_ASK = """\
import importlib.util, sys
missing = [name for name in sys.argv[1:] if not importlib.util.find_spec(name)]
sys.exit("it lacks " + " and ".join(missing) if missing else 0)
"""


def interpreter(root: Path) -> str:  # noqa: ARG001  where one can be made
    """Return an interpreter in which they import. NodeError when the node has none."""
    argv = (sys.executable, "-I", "-c", _ASK, *_NEEDS)
    asked = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if asked.returncode != 0:
        why = asked.stderr.strip().rpartition("\n")[2]
        raise NodeError(f"{sys.executable} cannot drive the job: {why}", hint=f"pip install {' '.join(_NEEDS)}")
    return sys.executable
