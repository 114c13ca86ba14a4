"""Which Python drives: it needs boto3 and paramiko, as a supervisor outside does."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from gpucloud import smi
from gpucloud.agent.layer.build import Failed, build
from gpucloud.agent.layer.fact import index_for, key_of, read_ready
from gpucloud.agent.layer.places import places
from gpucloud.domain.errors import NodeError
from gpucloud.domain.layer import LayerOrder, LayerWanted

_NEEDS = ("boto3", "paramiko")
_LOCK = "requirements.lock"
_LIMIT_S = 60.0
_ASK = """\
import importlib.util, sys
missing = [name for name in sys.argv[1:] if not importlib.util.find_spec(name)]
sys.exit("it lacks " + " and ".join(missing) if missing else 0)
"""


def able() -> str | None:
    """Return an interpreter in which they import: this one, or the one made for it; None while there is none."""
    if _imports(sys.executable):
        return sys.executable
    own = str(_layer_python())
    return own if _imports(own) else None


def make(pip_mirror: str | None) -> str:
    """Return such an interpreter, made on this node if need be: once, whoever asks. NodeError when it cannot be had.

    It is a layer like a job's, of the agent's own kind: by uv or pip, from the job's mirror, and by the hashes of the
    lock that gpucloud brings along.
    """
    found = able()
    if found is not None:
        return found
    wanted = LayerWanted(digest=_digest(), always=True, boto3=False, torch=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            lock = Path(folder, _LOCK)
            lock.write_bytes(_lock())
            setup = f"pip install -q --no-deps --require-hashes -r {shlex.quote(str(lock))}"
            build(LayerOrder(wanted=wanted, setup=setup, code=folder, pip_mirror=pip_mirror))
    except Failed as error:
        raise NodeError(
            f"no Python that can drive the job could be made: {error}",
            hint="let machines reach a package index: mirrors: {pip: https://…/simple}",
        ) from error
    return str(_layer_python())


def _layer_python() -> Path:
    folder = places().folder(key_of(_digest(), index_for(smi.gpus()[0])))
    ready = read_ready(folder)
    return Path(ready.python) if ready is not None else folder / "bin" / "python"


def _digest() -> str:
    return hashlib.sha256(b"driver " + _lock()).hexdigest()


def _lock() -> bytes:
    return files(__package__).joinpath(_LOCK).read_bytes()


def _imports(python: str) -> bool:
    argv = (python, "-I", "-c", _ASK, *_NEEDS)
    try:
        return subprocess.run(argv, capture_output=True, check=False, timeout=_LIMIT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
